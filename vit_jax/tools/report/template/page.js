// Draws the curves with uPlot; a button copies the command.

const PAGE = JSON.parse(document.getElementById('data').textContent);
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name);

function draw(spec, place) {
  const series = [{label: 'step', value: (u, x) => x?.toLocaleString('en') ?? '–'}];
  const tables = [];
  const show = (u, y) => y == null ? '–' : spec.percent ? `${(100 * y).toFixed(2)} %` : y.toPrecision(4);
  spec.curves.forEach((curve, i) => {
    const label = (PAGE.runs.length > 1 ? `${PAGE.runs[curve.run]} ` : '') + curve.name;
    const stroke = () => style(`--c${i % 8}`), dash = i >= 8 ? [6, 4] : [];
    const points = {show: curve.x.length < 50, size: 4};
    const y = spec.log ? curve.y.map(v => v > 0 ? v : null) : curve.y;  // no logarithm of 0
    tables.push([curve.x, y]);
    series.push({label, stroke, dash, width: 2, points, value: show});
  });
  const axis = () => ({stroke: () => style('--faint'), grid: {stroke: () => style('--line'), width: 1}, ticks: {show: false}});
  const values = spec.percent ? (u, ticks) => ticks.map(y => y == null ? '' : `${+(100 * y).toFixed(1)} %`) : undefined;
  const options = {
    width: place.clientWidth, height: 260, series,
    scales: {x: {time: false}, y: {distr: spec.log ? 3 : 1}},
    axes: [axis(), {...axis(), size: 64, ...(values && {values})}],
  };
  return new uPlot(options, uPlot.join(tables), place);
}

function chart(spec) {
  const figure = document.createElement('figure');
  figure.className = 'chart';
  figure.tabIndex = 0;
  figure.setAttribute('aria-label', `${spec.title}; arrow keys move over the steps`);
  const caption = figure.appendChild(document.createElement('figcaption'));
  const place = figure.appendChild(document.createElement('div'));
  const button = document.createElement('button');
  caption.append(spec.title, button);
  document.getElementById('charts').append(figure);
  let plot;
  const redraw = () => {
    plot?.destroy();
    button.textContent = spec.log ? 'linear scale' : 'log scale';
    plot = draw(spec, place);
  };
  button.type = 'button';
  button.addEventListener('click', () => { spec.log = !spec.log; redraw(); });
  figure.addEventListener('keydown', event => {
    const steps = plot.data[0], at = plot.cursor.idx ?? steps.length - 1;
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1}[event.key];
    if (to === undefined || event.target !== figure) return;
    event.preventDefault();
    const left = plot.valToPos(steps[Math.max(0, Math.min(steps.length - 1, to))], 'x');
    plot.setCursor({left, top: plot.over.clientHeight / 2});
  });
  new ResizeObserver(() => plot?.setSize({width: place.clientWidth, height: 260})).observe(place);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
  redraw();
}

PAGE.charts.forEach(chart);
if (!PAGE.charts.length) document.getElementById('charts').textContent = 'Nothing has been measured yet.';

for (const button of document.querySelectorAll('.copy')) {
  button.addEventListener('click', async () => {
    const code = button.parentElement.querySelector('code');
    getSelection().selectAllChildren(code);  // enough where the clipboard is closed to files
    await navigator.clipboard?.writeText(code.textContent);
    button.textContent = 'Copied';
  });
}
