// Confusion matrices on a canvas, for any number of classes.

class Matrix {
  constructor(element, found) {
    this.canvas = element.querySelector('canvas');
    this.readout = element.querySelector('.readout');
    this.found = found;
    this.names = found.names === null ? null : PAGE.names[found.names];
    this.K = found.classes;
    this.cells = new Map();
    for (let i = 0; i < found.cells.length; i += 3) {
      this.cells.set(found.cells[i] * this.K + found.cells[i + 1], found.cells[i + 2]);
    }
    this.at = [0, 0];
    drawByWidth(element, () => this.draw());
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.draw());
    this.canvas.addEventListener('pointermove', e => this.point(e));
    this.canvas.addEventListener('click', e => { this.point(e); this.open(); });
    this.canvas.addEventListener('keydown', e => this.key(e));
  }

  name(c) { return this.names && c < this.names.length ? this.names[c] : `class ${c}`; }

  // Pixels for the names beside and above the cells; none where they would not fit.
  margin(width, context) {
    if (this.K > 40) return 0;
    let longest = 0;
    for (let c = 0; c < this.K; c++) longest = Math.max(longest, context.measureText(this.name(c)).width);
    const margin = Math.min(longest + 8, width * 0.25, 120);
    return (width - margin) / this.K >= 11 ? margin : 0;
  }

  draw() {
    const width = Math.min(this.canvas.parentElement.clientWidth, 620);
    if (!width) return;
    const context = this.canvas.getContext('2d');
    const scale = devicePixelRatio || 1, font = '12px system-ui, sans-serif';
    context.font = font;
    const margin = this.margin(width, context);
    this.left = margin;
    this.size = Math.min((width - margin) / this.K, 44);
    const side = margin + this.size * this.K;
    this.canvas.width = this.canvas.height = Math.round(side * scale);
    this.canvas.style.width = `${side}px`;
    context.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const heat = style.getPropertyValue('--heat'), ink = style.getPropertyValue('--ink');
    context.fillStyle = style.getPropertyValue('--card');
    context.fillRect(margin, margin, side - margin, side - margin);
    // Cells of large matrices are smaller than a pixel, but are drawn at least as large.
    const least = Math.max(this.size, 1.6);
    context.font = font;
    context.textBaseline = 'middle';
    for (const [cell, n] of this.cells) {
      const row = Math.floor(cell / this.K), column = cell % this.K;
      const share = n / this.found.counts[row];
      context.fillStyle = `rgba(${heat}, ${0.12 + 0.88 * Math.sqrt(share)})`;
      const x = margin + column * this.size, y = margin + row * this.size;
      context.fillRect(x, y, least, least);
      if (this.size < 20) continue;
      const text = String(n);
      if (context.measureText(text).width > this.size - 2) continue;
      context.fillStyle = share > 0.3 ? style.getPropertyValue('--paper') : ink;
      context.textAlign = 'center';
      context.fillText(text, x + this.size / 2, y + this.size / 2);
    }
    if (margin) this.label(context, ink, margin);
  }

  label(context, ink, margin) {
    context.fillStyle = ink;
    for (let c = 0; c < this.K; c++) {
      let text = this.name(c);
      while (context.measureText(text).width > margin - 8 && text.length > 2) text = text.slice(0, -2) + '…';
      const middle = margin + (c + 0.5) * this.size;
      context.textAlign = 'right';
      context.fillText(text, margin - 4, middle);
      context.save();
      context.translate(middle, margin - 4);
      context.rotate(-Math.PI / 2);
      context.textAlign = 'left';
      context.fillText(text, 0, 0);
      context.restore();
    }
  }

  point(event) {
    if (!this.size) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this.left) / this.size);
    const row = Math.floor((event.clientY - box.top - this.left) / this.size);
    if (row >= 0 && column >= 0 && row < this.K && column < this.K) this.show(row, column);
  }

  show(row, column) {
    this.at = [row, column];
    const n = this.cells.get(row * this.K + column) || 0, of = this.found.counts[row] || 0;
    const share = of ? ` (${(100 * n / of).toFixed(1)} % of ${of.toLocaleString('en')})` : '';
    const verb = row === column ? 'recognised' : `taken for ${this.name(column)}`;
    this.readout.textContent = `${this.name(row)} ${verb}: ${n.toLocaleString('en')}${share}`;
  }

  // Opens the cell's line in the list below, if it is among the largest confusions.
  open() {
    const id = this.canvas.parentElement.dataset.evaluation;
    const entry = document.querySelector(
      `.pairs[data-evaluation="${id}"] [data-cell="${this.at.join(',')}"]`);
    if (!entry) return;
    entry.open = true;
    entry.querySelector('summary').focus();
  }

  key(event) {
    const moves = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};
    if (event.key === 'Enter') { this.open(); return; }
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [down, right] = moves[event.key];
    const inside = v => Math.max(0, Math.min(this.K - 1, v));
    this.show(inside(this.at[0] + down), inside(this.at[1] + right));
  }
}
