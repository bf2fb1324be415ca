// Kept tokens on what the encoder saw: one canvas per crop.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Stage {
  constructor(root, onToken) {
    this.root = root;
    this.onToken = onToken;
    this.views = [];
    this.busy = false;
    new ResizeObserver(() => this.draw()).observe(root);
  }

  setPicture(picture, urls) {
    this.root.replaceChildren();
    const many = picture.crops.length > 1;
    this.root.classList.toggle('many', many && picture.crops.some((crop) => crop.tile));
    let mosaic = null;
    this.views = picture.crops.map((crop, c) => {
      const canvas = document.createElement('canvas');
      const view = { canvas, crop, c, image: new Image(), eligible: crop.eligible && new Set(crop.eligible) };
      view.image.addEventListener('load', () => this.draw());
      view.image.src = urls[c];
      if (crop.tile) {
        if (!mosaic) {
          const figure = document.createElement('figure');
          mosaic = document.createElement('div');
          mosaic.className = 'mosaic';
          const columns = 1 + Math.max(...picture.crops.map((other) => (other.tile ? other.tile[1] : 0)));
          mosaic.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
          figure.append(mosaic, caption('tiles'));
          this.root.append(figure);
        }
        mosaic.append(canvas);
      } else {
        const figure = document.createElement('figure');
        figure.append(canvas);
        if (many) figure.append(caption('base view'));
        this.root.append(figure);
      }
      const locate = (event) => {
        const box = canvas.getBoundingClientRect();
        const column = Math.floor(((event.clientX - box.left) / box.width) * crop.columns);
        const row = Math.floor(((event.clientY - box.top) / box.height) * crop.rows);
        if (row >= 0 && row < crop.rows && column >= 0 && column < crop.columns) this.onToken({ crop: c, token: row * crop.columns + column });
      };
      canvas.addEventListener('pointermove', locate);
      canvas.addEventListener('pointerdown', locate);
      canvas.addEventListener('pointerleave', () => this.onToken(null));
      return view;
    });
  }

  show(content) {
    this.content = content;
    this.draw();
  }

  draw() {
    if (!this.content) return;
    const { crops, kindOf, cursor, heat } = this.content;
    const veil = css('--veil');
    const colours = { relevance: css('--relevance'), coverage: css('--coverage'), merged: css('--merged'), other: css('--other') };
    const scale = window.devicePixelRatio || 1;
    for (const { canvas, crop, c, image, eligible } of this.views) {
      const state = crops[c];
      const width = canvas.clientWidth;
      if (!state || !width) continue;
      const cell = width / crop.columns;
      const height = cell * crop.rows;
      if (canvas.width !== Math.round(width * scale)) {
        canvas.width = Math.round(width * scale);
        canvas.height = Math.round(height * scale);
      }
      const g = canvas.getContext('2d');
      g.setTransform(scale, 0, 0, scale, 0, 0);
      g.clearRect(0, 0, width, height);
      if (image.complete && image.naturalWidth) g.drawImage(image, 0, 0, width, height);
      const own = heat && heat[c];
      const top = own ? own.reduce((a, b) => Math.max(a, b), 1e-12) : 1;
      const rectangles = new Path2D();
      // Cells end on whole pixels, so that no seams show between them.
      const edge = (at) => Math.round(at * cell * scale) / scale;
      const area = (token) => {
        const [column, row] = [token % crop.columns, Math.floor(token / crop.columns)];
        return [edge(column), edge(row), edge(column + 1) - edge(column), edge(row + 1) - edge(row)];
      };
      if (own) rectangles.rect(0, 0, width, height);
      for (let token = 0; token < crop.rows * crop.columns; token += 1) {
        if (!own && !state.kept.has(token)) rectangles.rect(...area(token));
      }
      g.fillStyle = veil;
      g.fill(rectangles);
      for (let token = 0; token < crop.rows * crop.columns; token += 1) {
        const x = (token % crop.columns) * cell;
        const y = Math.floor(token / crop.columns) * cell;
        if (own) {
          g.globalAlpha = 0.85 * Math.sqrt(own[token] / top);
          g.fillStyle = colours.relevance;
          g.fillRect(...area(token));
          g.globalAlpha = 1;
        }
        if (eligible && !eligible.has(token)) hatch(g, x, y, cell, colours.other);
      }
      if (state.region && !own) drawRegions(g, crop, cell, state, area);
      if (cursor) this.outline(g, crop, c, cell, state, cursor, colours);
      g.strokeStyle = '#ffffff';
      g.lineWidth = Math.max(0.8, cell * 0.06);
      for (const token of state.kept) mark(g, (token % crop.columns) * cell, Math.floor(token / crop.columns) * cell, cell, kindOf(c, token), colours);
      if (cursor && cursor.crop === c) {
        g.strokeStyle = css('--ink');
        g.lineWidth = 2;
        g.strokeRect((cursor.token % crop.columns) * cell + 1, Math.floor(cursor.token / crop.columns) * cell + 1, cell - 2, cell - 2);
      }
    }
  }

  // What the token under the pointer was merged with, in every crop; or what it covers, in its own.
  outline(g, crop, c, cell, state, { crop: from, token }, colours) {
    const merged = from === c ? state.region && state.region[token] : -1;
    const elsewhere = from !== c && this.content.crops[from].region ? this.content.crops[from].region[token] : -1;
    const region = Math.max(merged === undefined ? -1 : merged, elsewhere);
    g.beginPath();
    if (region >= 0) trace(g, crop, cell, state.region, region);
    else if (from === c) trace(g, crop, cell, state.owners, state.kept.has(token) ? token : state.owners[token]);
    g.strokeStyle = region >= 0 ? colours.merged : colours.coverage;
    g.lineWidth = 2.5;
    g.stroke();
  }
}

// The border of all cells that belong to one owner.
function trace(g, crop, cell, owners, owner) {
  if (owner === undefined || owner < 0) return;
  const differs = (r, c) => r < 0 || c < 0 || r >= crop.rows || c >= crop.columns || owners[r * crop.columns + c] !== owner;
  owners.forEach((own, position) => {
    if (own !== owner) return;
    const column = position % crop.columns;
    const row = Math.floor(position / crop.columns);
    const [x, y] = [column * cell, row * cell];
    if (differs(row - 1, column)) line(g, x, y, x + cell, y);
    if (differs(row + 1, column)) line(g, x, y + cell, x + cell, y + cell);
    if (differs(row, column - 1)) line(g, x, y, x, y + cell);
    if (differs(row, column + 1)) line(g, x + cell, y, x + cell, y + cell);
  });
}

// Every merged token's sources as a tinted region; neighbours in number are far apart in hue.
function drawRegions(g, crop, cell, state, area) {
  state.regions.forEach((_, region) => {
    const hue = `hsl(${Math.round(region * 137.5) % 360} 60% 50%`;
    g.fillStyle = `${hue} / 0.22)`;
    state.region.forEach((own, token) => {
      if (own === region) g.fillRect(...area(token));
    });
    g.beginPath();
    trace(g, crop, cell, state.region, region);
    g.strokeStyle = `${hue} / 0.75)`;
    g.lineWidth = 1;
    g.stroke();
  });
}

function caption(text) {
  const element = document.createElement('figcaption');
  element.textContent = text;
  return element;
}

function line(g, x, y, u, v) {
  g.moveTo(x, y);
  g.lineTo(u, v);
}

function hatch(g, x, y, cell, colour) {
  g.strokeStyle = colour;
  g.lineWidth = 0.7;
  g.beginPath();
  line(g, x, y + cell, x + cell, y);
  g.stroke();
}

function mark(g, x, y, cell, kind, colours) {
  const r = cell * 0.32;
  const [cx, cy] = [x + cell / 2, y + cell / 2];
  g.fillStyle = colours[kind] || colours.other;
  g.beginPath();
  if (kind === 'relevance') {
    g.arc(cx, cy, r, 0, 2 * Math.PI);
  } else if (kind === 'coverage') {
    g.moveTo(cx, cy - r);
    g.lineTo(cx + r * 1.05, cy + r * 0.85);
    g.lineTo(cx - r * 1.05, cy + r * 0.85);
    g.closePath();
  } else if (kind === 'merged') {
    g.moveTo(cx, cy - r * 1.25);
    g.lineTo(cx + r * 1.25, cy);
    g.lineTo(cx, cy + r * 1.25);
    g.lineTo(cx - r * 1.25, cy);
    g.closePath();
  } else {
    g.rect(cx - r * 0.85, cy - r * 0.85, r * 1.7, r * 1.7);
  }
  g.fill();
  g.stroke();
}
