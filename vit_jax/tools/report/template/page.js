// Starts the charts, matrices, thumbnails and buttons of the page.

document.getElementById('charts').append(...PAGE.charts.map(spec => new Chart(spec).element));
if (!PAGE.charts.length) document.getElementById('charts').textContent = 'Nothing has been measured yet.';

const evaluations = Object.fromEntries(PAGE.evaluations.map(e => [e.id, e]));

for (const element of document.querySelectorAll('.matrix')) {
  new Matrix(element, evaluations[element.dataset.evaluation]);
}

// Thumbnails become images when their confusion is opened.
for (const list of document.querySelectorAll('.pairs')) {
  const found = evaluations[list.dataset.evaluation];
  for (const pair of list.querySelectorAll('.pair')) {
    pair.addEventListener('toggle', () => {
      const place = pair.querySelector('.thumbnails');
      if (!pair.open || place.childNodes.length) return;
      const urls = found.thumbnails[pair.dataset.place] || [];
      const what = pair.querySelector('summary').textContent.trim();
      place.append(...urls.map((src, i) => html('img', {src, alt: `${what}, example ${i + 1}`})));
      if (!urls.length) place.textContent = 'The page has no pictures of these.';
    });
  }
}

for (const box of document.querySelectorAll('input.attention')) {
  const list = document.querySelector(`.mistakes[data-evaluation="${box.dataset.evaluation}"]`);
  const apply = () => list.classList.toggle('attended', box.checked);
  box.addEventListener('change', apply);
  apply();
}

for (const button of document.querySelectorAll('.copy')) {
  button.addEventListener('click', async () => {
    const code = button.parentElement.querySelector('code');
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = 'Copied';
    } catch {  // as in a page opened from a file: select the text instead
      getSelection().selectAllChildren(code);
      button.textContent = 'Selected';
    }
    setTimeout(() => { button.textContent = 'Copy'; }, 2000);
  });
}
