// Curves as SVG, with a cursor that follows the pointer and the arrow keys.
'use strict';

const PAGE = JSON.parse(document.getElementById('data').textContent);
const DASHES = ['', '6 3', '2 3', '9 3 2 3'];

function svg(name, attributes, text) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  return element;
}

function html(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  element.append(...children);
  return element;
}

function shown(value, percent) {
  if (value === null) return 'not finite';
  if (percent) return (value * 100).toFixed(Math.abs(value) < 0.1 ? 2 : 1) + ' %';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) {
    return Number(value.toPrecision(3)).toExponential();
  }
  if (size >= 1000) return Math.round(value).toLocaleString('en');
  return String(Number(value.toPrecision(4)));
}

// Round numbers from low to high, about as many as asked for.
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

// Powers of ten; with fewer than two of them in the range, round numbers.
function logTicks(low, high, count) {
  const found = [];
  for (let e = Math.ceil(low - 1e-9); e <= high + 1e-9; e++) found.push(10 ** e);
  if (found.length < 2) return ticks(10 ** low, 10 ** high, count).filter(v => v > 0);
  return found.filter((_, i) => i % Math.ceil(found.length / (count + 1)) === 0);
}

function nearest(x, value) {
  let low = 0, high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(x[low] - value) <= Math.abs(x[high] - value) ? low : high;
}

// Draws once an element has a width, and again whenever that changes.
function drawByWidth(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    requestAnimationFrame(draw);
  }).observe(element);
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.log = spec.log && this.canBeLog();
    const several = PAGE.runs.length > 1;
    const names = [...new Set(spec.curves.map(c => c.name))];
    this.curves = spec.curves.map((curve, i) => ({
      ...curve,
      label: several
        ? PAGE.runs[curve.run] + (names.length > 1 ? ' ' + curve.name : '') : curve.name,
      colour: `var(--c${(several ? curve.run : i) % 8})`,
      dash: several ? DASHES[names.indexOf(curve.name) % DASHES.length] : DASHES[i >> 3] || '',
      on: true,
    }));
    this.build();
  }

  canBeLog() {
    return !this.spec.percent && this.spec.curves.every(
      c => c.y.every(v => v === null || v >= 0) && c.y.some(v => v > 0));
  }

  build() {
    const caption = html('figcaption', {}, html('span', {}, this.spec.title));
    if (this.canBeLog()) {
      const button = html('button', {type: 'button', 'aria-pressed': this.log}, 'log');
      button.setAttribute('aria-label', `${this.spec.title}: logarithmic scale`);
      button.addEventListener('click', () => {
        this.log = !this.log;
        button.setAttribute('aria-pressed', this.log);
        this.draw();
      });
      caption.append(button);
    }
    this.plot = html('div', {class: 'plot', tabindex: 0, role: 'img'});
    this.tip = html('div', {class: 'tip', hidden: ''});
    this.live = html('div', {class: 'hidden', 'aria-live': 'polite'});
    this.element = html('figure', {class: 'chart'}, caption, this.plot, this.live);
    if (this.curves.length > 1) this.element.append(this.legend());
    this.plot.setAttribute('aria-label', this.summary());
    this.plot.addEventListener('pointermove', e => this.point(e));
    this.plot.addEventListener('pointerdown', e => this.point(e));
    // Lifting a finger keeps the values shown until another place is touched.
    this.plot.addEventListener('pointerleave', e => { if (e.pointerType !== 'touch') this.leave(); });
    this.plot.addEventListener('blur', () => this.leave());
    this.plot.addEventListener('keydown', e => this.key(e));
    drawByWidth(this.plot, () => this.draw());
  }

  summary() {
    const parts = this.curves.map(c => {
      const values = c.y.filter(v => v !== null);
      const last = shown(c.y[c.y.length - 1], this.spec.percent);
      if (values.length < 2) return `${c.label}: ${last}`;
      return `${c.label} from ${shown(values[0], this.spec.percent)} to ${last}`;
    });
    return `${this.spec.title} by step. ${parts.join('; ')}. Arrow keys read the values.`;
  }

  legend() {
    return html('div', {class: 'legend'}, ...this.curves.map(curve => {
      const sample = svg('svg', {viewBox: '0 0 24 10', 'aria-hidden': 'true'});
      const line = svg('path', {d: 'M0 5H24', 'stroke-dasharray': curve.dash, 'stroke-width': 3});
      line.style.stroke = curve.colour;
      sample.append(line);
      const button = html('button', {type: 'button', 'aria-pressed': 'true'}, sample, curve.label);
      button.addEventListener('click', () => {
        curve.on = !curve.on;
        button.setAttribute('aria-pressed', curve.on);
        this.draw();
      });
      return button;
    }));
  }

  range() {
    const values = this.curves.filter(c => c.on).flatMap(c => c.y)
      .filter(v => v !== null && (!this.log || v > 0)).map(v => this.log ? Math.log10(v) : v);
    if (!values.length) return [0, 1];
    let low = values.reduce((a, b) => Math.min(a, b));
    let high = values.reduce((a, b) => Math.max(a, b));
    if (!this.log && low > 0 && low < high * 0.5) low = 0;
    if (high === low) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
    const margin = (high - low) * 0.04;
    low -= low === 0 ? 0 : margin;
    high += this.spec.percent && high <= 1 && high + margin > 1 ? 1 - high : margin;
    return [low, high];
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const height = Math.round(Math.min(260, Math.max(180, width * 0.5)));
    const [low, high] = this.range();
    const marks = this.log ? logTicks(low, high, 4) : ticks(low, high, 4);
    const labels = marks.map(v => shown(v, this.spec.percent));
    const left = 12 + 6.8 * Math.max(...labels.map(l => l.length));
    const box = {left, right: width - 12, top: 8, bottom: height - 24};
    const lastX = Math.max(1, ...this.curves.map(c => c.x[c.x.length - 1]));
    this.x = v => box.left + (box.right - box.left) * v / lastX;
    this.y = v => box.bottom - (box.bottom - box.top) * ((this.log ? Math.log10(v) : v) - low) / (high - low);
    this.box = box;
    this.lastX = lastX;
    const picture = svg('svg', {viewBox: `0 0 ${width} ${height}`, height, 'aria-hidden': 'true'});
    marks.forEach((value, i) => {
      const y = this.y(value).toFixed(1);
      picture.append(svg('path', {class: 'grid', d: `M${box.left} ${y}H${box.right}`}));
      picture.append(svg('text', {class: 'y', x: box.left - 6, y: Number(y) + 4}, labels[i]));
    });
    const across = ticks(0, lastX, Math.max(2, Math.floor((box.right - box.left) / 90)));
    across.filter(Number.isInteger).forEach(value => {
      const text = value.toLocaleString('en');
      const x = Math.min(this.x(value), width - text.length * 3.6);
      picture.append(svg('text', {x, y: height - 6}, text));
    });
    for (const curve of this.curves) if (curve.on) this.line(picture, curve);
    this.mark = svg('path', {class: 'cursor', d: ''});
    picture.append(this.mark);
    this.plot.replaceChildren(picture, this.tip);
    this.leave();
  }

  path(x, y) {
    let path = '', pen = false;
    y.forEach((v, i) => {
      if (v === null || (this.log && v <= 0)) { pen = false; return; }
      path += `${pen ? 'L' : 'M'}${this.x(x[i]).toFixed(1)} ${this.y(v).toFixed(1)}`;
      pen = true;
    });
    return path;
  }

  // Many points are drawn faintly, with their mean; few points are drawn with dots.
  line(picture, curve) {
    const draw = (x, y, faint) => {
      const line = svg('path', {class: faint ? 'curve faint' : 'curve', d: this.path(x, y)});
      line.setAttribute('stroke-dasharray', faint ? '' : curve.dash);
      line.style.stroke = curve.colour;
      picture.append(line);
    };
    draw(curve.x, curve.y, Boolean(curve.mean));
    if (curve.mean) draw(...curve.mean);
    if (curve.y.length > 12) return;
    curve.y.forEach((v, i) => {
      if (v === null || (this.log && v <= 0)) return;
      const dot = svg('circle', {cx: this.x(curve.x[i]), cy: this.y(v), r: 3});
      dot.style.fill = curve.colour;
      picture.append(dot);
    });
  }

  point(event) {
    if (!this.x) return;
    const at = event.clientX - this.plot.getBoundingClientRect().left;
    const {left, right} = this.box;
    this.show((at - left) / (right - left) * this.lastX);
  }

  show(value, say) {
    const on = this.curves.filter(c => c.on);
    if (!on.length) return;
    const steps = on.map(c => c.x[nearest(c.x, value)]);
    const step = steps.reduce((a, b) => Math.abs(a - value) <= Math.abs(b - value) ? a : b);
    this.step = step;
    const x = this.x(step);
    this.mark.setAttribute('d', `M${x.toFixed(1)} ${this.box.top}V${this.box.bottom}`);
    const lines = on.map(curve => {
      const i = nearest(curve.x, step);
      const elsewhere = curve.x[i] === step ? '' : ` (step ${curve.x[i].toLocaleString('en')})`;
      return [curve, `${curve.label}: ${shown(curve.y[i], this.spec.percent)}${elsewhere}`];
    });
    this.tip.replaceChildren(html('b', {}, `step ${step.toLocaleString('en')}`));
    for (const [curve, text] of lines) {
      const line = html('div', {}, text);
      line.style.color = curve.colour;
      this.tip.append(line);
    }
    this.tip.hidden = false;
    const width = this.plot.clientWidth;
    const beside = x > width / 2 ? x - this.tip.offsetWidth - 10 : x + 10;
    this.tip.style.left = `${Math.max(0, Math.min(width - this.tip.offsetWidth, beside))}px`;
    if (say) this.live.textContent = `step ${step}. ${lines.map(l => l[1]).join('. ')}`;
  }

  leave() {
    this.tip.hidden = true;
    if (this.mark) this.mark.setAttribute('d', '');
  }

  key(event) {
    const steps = [...new Set(this.curves.filter(c => c.on).flatMap(c => c.x))].sort((a, b) => a - b);
    if (!steps.length) return;
    const far = Math.max(1, Math.round(steps.length / 20));
    const moves = {ArrowLeft: -1, ArrowRight: 1, PageUp: far, PageDown: -far};
    let i = this.step === undefined ? steps.length - 1 : nearest(steps, this.step) + (moves[event.key] || 0);
    if (event.key === 'Home') i = 0;
    else if (event.key === 'End') i = steps.length - 1;
    else if (!(event.key in moves)) return;
    event.preventDefault();
    this.show(steps[Math.max(0, Math.min(steps.length - 1, i))], true);
  }
}
