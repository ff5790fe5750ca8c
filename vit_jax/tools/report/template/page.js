// Draws the curves with uPlot; a button copies the command.

const PAGE = JSON.parse(document.getElementById('data').textContent);
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name);
// Six digits tell neighbouring ticks apart.
const digits = new Intl.NumberFormat('en', {maximumSignificantDigits: 6});
// Where no point is chosen, the legend has the last value.
const chosen = (u, value, series, at) => at == null ? u.data[series].findLast(y => y != null) : value;
const text = (y, percent) => y == null ? '–' : percent ? `${(100 * y).toFixed(2)}%` : y.toPrecision(4);

function draw(spec, place) {
  const share = spec.x !== 'step';  // on the x axis
  const byRun = PAGE.runs.length > 1 && new Set(spec.curves.map(c => c.name)).size === 1;
  const series = [{label: spec.x, value: (...at) => share ? text(chosen(...at), true) : chosen(...at)?.toLocaleString('en') ?? '–'}];
  const tables = spec.curves.map((curve, i) => {
    const color = byRun ? curve.run : i, stroke = () => style(`--c${color % 8}`);
    const label = byRun ? PAGE.runs[curve.run] : curve.name, dash = color >= 8 ? [6, 4] : [];
    const points = {show: curve.x.length < 50, size: 4}, value = (...at) => text(chosen(...at), spec.percent);
    series.push({label, stroke, dash, width: 2, points, spanGaps: true, value});
    return [curve.x, spec.log ? curve.y.map(y => y > 0 ? y : null) : curve.y];  // no logarithm of 0
  });
  const axis = (percent, more) => ({
    stroke: () => style('--faint'), grid: {stroke: () => style('--line'), width: 1}, ticks: {show: false},
    font: '12px system-ui', labelFont: '12px system-ui', ...more,
    values: (u, ticks) => ticks.map(y => y == null ? '' : percent ? `${digits.format(100 * y)}%` : digits.format(y)),
  });
  const percents = (u, low, high) => [Math.max(0, low - 0.01), Math.min(1, high + 0.01)];
  const range = spec.log ? null : spec.percent ? percents : spec.zero ? (u, low, high) => [0, 1.1 * high] : null;
  const options = {
    width: place.clientWidth, height: 280, series,
    scales: {x: {time: false}, y: {distr: spec.log ? 3 : 1, ...(range && {range})}},
    axes: [axis(share, {label: spec.x, labelSize: 20, size: 34}), axis(spec.percent, {size: 64})],
  };
  const plot = new uPlot(options, uPlot.join(tables), place);
  plot.root.querySelector('.u-legend').ariaLive = 'polite';
  return plot;
}

function chart(spec, group) {
  const figure = group.appendChild(document.createElement('figure'));
  const ariaLabel = `${spec.title}; arrow keys move along the curves`;
  Object.assign(figure, {className: 'chart', tabIndex: 0, ariaLabel});
  const caption = figure.appendChild(document.createElement('figcaption'));
  const place = figure.appendChild(document.createElement('div'));
  const button = document.createElement('button');
  caption.append(spec.title, ...(spec.x === 'step' ? [button] : []));
  let plot;
  const redraw = () => {
    plot?.destroy();
    button.textContent = spec.log ? 'linear scale' : 'log scale';
    plot = draw(spec, place);
  };
  button.addEventListener('click', () => { spec.log = !spec.log; redraw(); });
  figure.addEventListener('keydown', event => {
    const steps = plot.data[0], last = steps.length - 1, at = plot.cursor.idx ?? last;
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last}[event.key];
    if (to === undefined || event.target !== figure) return;
    event.preventDefault();
    const left = plot.valToPos(steps[Math.max(0, Math.min(last, to))], 'x');
    plot.setCursor({left, top: plot.over.clientHeight / 2});
  });
  const resize = () => plot?.setSize({width: place.clientWidth, height: 280});
  new ResizeObserver(() => requestAnimationFrame(resize)).observe(place);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
  redraw();
}

for (const group of document.querySelectorAll('.charts')) PAGE.charts[group.dataset.key].forEach(spec => chart(spec, group));
for (const button of document.querySelectorAll('.copy')) button.addEventListener('click', async () => {
  const code = button.parentElement.querySelector('code');
  getSelection().selectAllChildren(code);  // enough where the clipboard is closed to files
  await navigator.clipboard?.writeText(code.textContent);
  button.textContent = 'Copied';
});
