// Coverage, reference and target along the run, and below them what chose each pick.

import uPlot from './vendor/uPlot.js';

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Curves {
  constructor(root) {
    this.root = root;
    this.at = 0;
    this.width = 0;
    new ResizeObserver(() => {
      if (this.plot && Math.abs(root.clientWidth - this.width) > 1) this.resize();
    }).observe(root);
  }

  resize() {
    this.width = this.root.clientWidth;
    this.plot.setSize({ width: this.width, height: 200 });
  }

  setRun(crop, other, names) {
    this.crop = crop;
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.root.replaceChildren();
    this.root.hidden = !crop;
    if (!crop) return;
    const steps = Array.from(crop.coverage, (_, t) => t);
    const axis = { stroke: css('--soft'), grid: { stroke: css('--line'), width: 1 }, ticks: { show: false }, font: '11px system-ui, sans-serif' };
    const series = [
      {},
      { label: `coverage, ${names[0]}`, stroke: css('--coverage'), width: 2.4, points: { show: false } },
      { label: 'reference', stroke: css('--reference'), width: 1.4, points: { show: false } },
      { label: 'target', stroke: css('--relevance'), width: 1.6, dash: [6, 4], points: { show: false } },
    ];
    const data = [steps, crop.coverage, crop.reference, crop.target];
    if (other) {
      series.push({ label: `coverage, ${names[1]}`, stroke: css('--ink'), width: 1.4, dash: [2, 3], points: { show: false } });
      data.push(steps.map((t) => (t < other.coverage.length ? other.coverage[t] : null)));
    }
    this.width = this.root.clientWidth;
    this.plot = new uPlot({
      width: this.width, height: 200, series, legend: { show: false }, cursor: { show: false }, padding: [8, 12, 0, 0],
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, high * 1.04] } },
      axes: [{ ...axis, size: 28 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => String(Number(tick.toPrecision(3)))) }],
      hooks: { draw: [(plot) => this.strip(plot)] },
    }, data, this.root);
    const key = document.createElement('div');
    key.className = 'key';
    for (const { label, stroke, dash } of series.slice(1).map((one, i) => ({ ...one, stroke: [css('--coverage'), css('--reference'), css('--relevance'), css('--ink')][i] }))) {
      const item = document.createElement('span');
      const sign = document.createElement('i');
      sign.style.borderTopColor = stroke;
      if (dash) sign.style.borderTopStyle = 'dashed';
      item.append(sign, label);
      key.append(item);
    }
    this.root.append(key);
  }

  move(t) {
    this.at = t;
    if (this.plot) this.plot.redraw(false, false);
  }

  // Relevance is a full stroke, coverage half of one, so that the strip can be read without colours.
  strip(plot) {
    const { ctx, bbox } = plot;
    const tall = 10 * devicePixelRatio;
    const bottom = bbox.top + bbox.height;
    const x = (t) => plot.valToPos(t, 'x', true);
    const thick = Math.max(devicePixelRatio, x(1) - x(0));
    const colours = { relevance: css('--relevance'), coverage: css('--coverage') };
    const other = css('--other');
    ctx.save();
    this.crop.criterion.forEach((name, t) => {
      const high = name === 'relevance' ? tall : tall / 2;
      ctx.fillStyle = colours[name] || other;
      ctx.globalAlpha = t < this.at ? 1 : 0.35;
      ctx.fillRect(x(t), bottom - high, thick, high);
    });
    ctx.globalAlpha = 1;
    ctx.fillStyle = css('--ink');
    ctx.fillRect(x(this.at) - devicePixelRatio / 2, bbox.top, devicePixelRatio, bbox.height);
    ctx.restore();
  }
}
