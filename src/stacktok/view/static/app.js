// The page: one state, drawn; every control changes the state and nothing else.

import * as api from './api.js';
import { Curves } from './curves.js';
import { Stage } from './stage.js';
import * as runs from './trace.js';

const $ = (id) => document.getElementById(id);
// In place of a word's number: the weights that query-weighted coverage gives the tokens.
const WEIGHTS = -1;
const state = { image: '', question: '', budget: 64, method: '', other: '', frame: null, word: null, crop: 0 };
const curves = new Curves($('curves'));
let info = null;
let picture = null;
let full = null;
let panels = [];
let cursor = null;
let playing = null;
let resting = null;
let pending = 0;

const milliseconds = (seconds) => (seconds === undefined ? '' : seconds < 0.01 ? `${(1000 * seconds).toFixed(1)} ms` : seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'onclick') made.addEventListener('click', value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function say(text) {
  $('message').textContent = text || '';
  $('message').hidden = !text;
}

// What the page waits for, said in words, with the seconds that it has taken so far.
let waits = [];

function sayWaits() {
  const last = waits[waits.length - 1];
  const seconds = last ? Math.floor((performance.now() - last.since) / 1000) : 0;
  $('status').textContent = last ? `${last.text}${seconds ? ` ${seconds} s` : ''}` : '';
}

setInterval(() => { if (waits.length) sayWaits(); }, 1000);

async function wait(text, work) {
  const entry = { text, since: performance.now() };
  waits.push(entry);
  sayWaits();
  try {
    return await work();
  } finally {
    waits = waits.filter((one) => one !== entry);
    sayWaits();
  }
}

// Runs a request of the page; what a newer state made pointless is dropped in silence.
async function attempt(work) {
  try {
    return await work();
  } catch (error) {
    if (!(error instanceof api.Stale)) say(error.message);
    return undefined;
  }
}

// --- the link -------------------------------------------------------------------------------------------------------

function writeLink() {
  const link = new URLSearchParams({ image: state.image, q: state.question, k: state.budget, method: state.method });
  if (state.other) link.set('with', state.other);
  if (state.frame !== null) link.set('frame', state.frame);
  if (state.word !== null) link.set('word', state.word);
  if (state.crop) link.set('crop', state.crop);
  history.replaceState(null, '', `#${link}`);
}

function readLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  const number = (name, fallback) => (/^\d+$/.test(link.get(name) || '') ? Number(link.get(name)) : fallback);
  state.image = link.get('image') || (info.samples[0] ? info.samples[0].image : '');
  const sample = info.samples.find((one) => one.image === state.image);
  state.question = link.has('q') ? link.get('q') : (sample && sample.questions[0]) || '';
  state.budget = number('k', 64);
  state.method = info.methods.includes(link.get('method')) ? link.get('method') : info.methods[0];
  state.other = info.methods.includes(link.get('with')) ? link.get('with') : '';
  state.frame = number('frame', null);
  state.word = number('word', null);
  state.crop = number('crop', 0);
}

// --- panels ---------------------------------------------------------------------------------------------------------

function buildPanels() {
  const methods = [state.method, ...(state.other ? [state.other] : [])];
  $('panels').replaceChildren();
  panels = methods.map((method, at) => {
    const select = element('select', { 'aria-label': at ? 'Second method' : 'Method' }, ...info.methods.map((name) => element('option', { value: name }, name)));
    select.value = method;
    select.addEventListener('change', () => {
      state[at ? 'other' : 'method'] = select.value;
      state.frame = null;
      rebuildPanels();
      ask();
    });
    const toggle = at
      ? element('button', { type: 'button', onclick: () => compare('') }, 'Close')
      : element('button', { type: 'button', id: 'compare', 'aria-pressed': String(Boolean(state.other)), onclick: () => compare(state.other ? '' : info.methods.find((name) => name !== state.method)) }, 'Compare');
    const stage = element('div', { class: 'stage', tabindex: '0', role: 'group', 'aria-label': `Tokens kept by ${method}` });
    const metrics = element('div', { class: 'metrics' });
    $('panels').append(element('section', { class: 'panel', 'aria-label': method }, element('header', {}, select, toggle), stage, metrics));
    const panel = { method, at, root: stage, metrics, trace: null, set: null, answer: null };
    panel.stage = new Stage(stage, (token) => { cursor = token && { ...token, panel: at }; draw(); });
    stage.addEventListener('keydown', (event) => stepOver(event, panel));
    if (picture) panel.stage.setPicture(picture, picture.crops.map((_, c) => api.cropUrl(picture.image, c)));
    return panel;
  });
}

// New panels keep what is known about their methods.
function rebuildPanels() {
  const known = panels.map(({ method, trace, answer }) => ({ method, trace, answer }));
  buildPanels();
  for (const panel of panels) Object.assign(panel, known.find(({ method }) => method === panel.method));
  cursor = null;
}

function compare(other) {
  state.other = other;
  state.frame = null;
  rebuildPanels();
  ask();
  $('compare').focus();
}

function stepOver(event, panel) {
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (!event.shiftKey || !moves[event.key] || !picture) return;
  event.preventDefault();
  event.stopPropagation();
  const here = cursor && cursor.panel === panel.at ? cursor : { crop: state.crop, token: 0 };
  const { rows, columns } = picture.crops[here.crop];
  const row = Math.min(rows - 1, Math.max(0, Math.floor(here.token / columns) + moves[event.key][0]));
  const column = Math.min(columns - 1, Math.max(0, (here.token % columns) + moves[event.key][1]));
  cursor = { crop: here.crop, token: row * columns + column, panel: panel.at };
  draw();
}

// Nothing that waits for the slider may overtake a picture or a question that is on its way.
async function first(work) {
  pending += 1;
  try {
    await work();
  } finally {
    pending -= 1;
  }
}

const open = (name, file) => first(() => openPicture(name, file));
const ask = () => first(askQuestion);

// --- asking ---------------------------------------------------------------------------------------------------------

async function openPicture(name, file) {
  stop();
  clearTimeout(resting);
  const own = api.newState();
  say('');
  for (const panel of panels) panel.root.classList.add('busy');
  const found = await attempt(() => wait(file ? 'Sending and encoding the picture…' : 'Encoding the picture…', () => (file ? api.upload(own, file) : api.image(own, name))));
  for (const panel of panels) panel.root.classList.remove('busy');
  if (!found || !api.current(own)) return;
  picture = found;
  state.image = found.image;
  state.crop = Math.min(state.crop, picture.crops.length - 1);
  state.budget = Math.min(Math.max(1, state.budget), picture.capacity);
  for (const input of [$('budget'), $('count')]) input.max = picture.capacity;
  $('of').textContent = `of ${picture.positions}`;
  cursor = null;
  buildPanels();
  buildSamples();
  await ask();
}

async function askQuestion() {
  stop();
  clearTimeout(resting);
  const own = api.newState();
  if (!picture) return;
  const query = (panel) => ({ image: state.image, question: state.question, method: panel.method });
  const missing = panels.filter(({ trace }) => !trace || trace.question !== state.question || trace.image !== state.image);
  for (const panel of missing) {
    Object.assign(panel, { answer: null, set: null });
    panel.root.classList.add('busy');
  }
  say('');
  drawAnswers();
  const names = missing.map(({ method }) => method).join(' and ');
  const found = await attempt(() => wait(`Selecting for every budget: ${names}…`, () => Promise.all(missing.map((panel) => api.trace(own, query(panel))))));
  if (api.current(own)) drawAnswers();
  if (!found || !api.current(own)) return;
  found.forEach((trace, i) => { missing[i].trace = runs.index(trace); });
  if (state.word !== null && state.word >= panels[0].trace.words.length) state.word = null;
  say('');
  buildWords();
  buildTiles();
  buildCurves();
  draw();
  rest();
}

// What changes with the budget and needs the model: answers, and sets of methods whose runs have no prefixes.
function rest() {
  clearTimeout(resting);
  resting = setTimeout(refresh, 150);
}

async function refresh() {
  if (pending) return;
  const own = api.newState();
  const budget = state.budget;
  const query = { image: state.image, question: state.question };
  await attempt(async () => {
    for (const panel of panels) {
      if (panel.trace && !panel.trace.anytime && (!panel.set || panel.set.budget !== budget)) {
        panel.set = await wait(`Selecting ${budget} tokens: ${panel.method}…`, () => api.kept(own, { ...query, method: panel.method, budget }));
        draw();
      }
    }
    for (const panel of panels) {
      if (!panel.answer || panel.answer.budget !== budget || panel.answer.question !== state.question || panel.answer.image !== state.image) {
        panel.answer = null;
        drawAnswers();
        const answer = await wait(`Answering with ${budget} tokens: ${panel.method}…`, () => api.answer(own, { ...query, method: panel.method, budget }));
        panel.answer = { ...answer, budget, ...query };
        drawAnswers();
      }
    }
    if (!full || full.question !== query.question || full.image !== query.image) {
      full = { ...(await wait('Answering with all tokens…', () => api.fullAnswer(own, query))), ...query };
    }
    drawAnswers();
    drawTimes();
    document.body.dataset.settled = JSON.stringify([state.image, state.question, budget, state.method, state.other]);
  });
  if (api.current(own)) drawAnswers();
}

// --- building -------------------------------------------------------------------------------------------------------

function buildSamples() {
  $('samples').replaceChildren(...info.samples.map(({ image, questions }) => element(
    'button',
    {
      type: 'button', 'aria-pressed': String(image === state.image), 'aria-label': image,
      onclick: () => { state.question = questions[0] || ''; $('question').value = state.question; state.frame = null; state.word = null; open(image); },
    },
    element('img', { src: api.sampleUrl(image), alt: '' }),
  )));
  const questions = (picture && picture.questions) || [];
  $('suggested').replaceChildren(...questions.slice(0, 6).map((text) => element('button', {
    type: 'button', onclick: () => { state.question = text; $('question').value = text; state.frame = null; state.word = null; ask(); },
  }, text)));
  $('suggestions').replaceChildren(...questions.map((text) => element('option', { value: text })));
}

// The question as it was asked; words that are not part of the query are struck through.
function buildAsked() {
  const { asked } = panels[0].trace;
  const parts = asked.map(([text, kept]) => (kept || !/[\p{L}\p{N}]/u.test(text) ? text : element('del', { title: 'Not part of the query' }, text)));
  $('asked').replaceChildren(...parts);
  $('asked').hidden = !asked.some(([, kept]) => kept);
}

function buildWords() {
  buildAsked();
  const { words } = panels[0].trace;
  $('words').replaceChildren(...words.map((word, at) => element(
    'button',
    {
      type: 'button', 'aria-pressed': String(state.word === at), title: 'Show where this word looks',
      onclick: () => { state.word = state.word === at ? null : at; draw(); },
    },
    element('span', { class: 'name' }, word.text), element('span', { class: 'bar' }, element('i')), element('span', { class: 'value' }),
  )));
  if (!words.length) $('words').append(element('p', { class: 'note' }, 'No question: the image alone decides.'));
  if (!panels.some((panel) => runs.weightHeat(panel.trace, 0))) return;
  $('words').append(element(
    'button',
    {
      id: 'weights', type: 'button', 'aria-pressed': String(state.word === WEIGHTS), title: 'Show how much each token weighs',
      onclick: () => { state.word = state.word === WEIGHTS ? null : WEIGHTS; draw(); },
    },
    element('span', { class: 'name' }, 'Row weights'),
  ));
}

function buildTiles() {
  const many = picture.crops.length > 1;
  $('tiles-section').hidden = !many;
  if (!many) return;
  let tile = 0;
  $('tiles').replaceChildren(...picture.crops.map((crop, c) => element(
    'button',
    { type: 'button', 'aria-pressed': 'false', onclick: () => { state.crop = c; buildCurves(); draw(); } },
    element('span', {}, crop.tile ? `tile ${(tile += 1)}` : 'base view'), element('span', { class: 'bar' }, element('i')), element('span', { class: 'value' }),
  )));
}

// The panels whose runs have steps; the film, the curves and the tiles' sizes follow the first of them.
const stepped = () => panels.filter(({ trace }) => trace && trace.anytime);

function buildCurves() {
  const [first, second] = stepped().map(({ trace }) => trace.crops[state.crop]);
  curves.setRun(first, second, stepped().map(({ method }) => method));
  $('which').textContent = picture.crops.length > 1 ? `· view ${state.crop + 1} of ${picture.crops.length}` : '';
}

// --- drawing --------------------------------------------------------------------------------------------------------

function shown(panel) {
  const { trace, set } = panel;
  if (!trace) return null;
  if (!trace.anytime) {
    if (!set) return null;
    return { crops: runs.fixed(set, picture.crops.map(({ rows, columns }) => rows * columns)), now: null };
  }
  if (state.frame === null) return { crops: runs.keptAt(trace, state.budget), now: null };
  return runs.frameAt(trace, state.budget, state.frame);
}

function draw() {
  if (!picture || !panels.length || !panels[0].trace) return;
  performance.mark('draw');
  const [leader] = stepped();
  const last = leader ? runs.frames(leader.trace, state.budget) : state.budget;
  for (const name of ['film', 'back', 'play', 'forth']) $(name).disabled = !leader;
  if (state.frame !== null && state.frame > last) state.frame = last;
  const frame = state.frame === null ? last : state.frame;
  for (const input of [$('budget'), $('count')]) if (document.activeElement !== input || input.type === 'range') input.value = state.budget;
  Object.assign($('film'), { max: last, value: frame });
  $('step').textContent = `${frame} of ${last}`;
  let at = 0;
  for (const panel of panels) {
    const view = shown(panel);
    panel.root.classList.toggle('busy', Boolean(panel.trace && !panel.trace.anytime && (!panel.set || panel.set.budget !== state.budget)));
    if (!view) continue;
    panel.view = view;
    const own = cursor && cursor.panel === panel.at ? cursor : state.frame !== null ? view.now : null;
    const word = state.word !== null && panel.trace.words[state.word];
    const heatOf = state.word === WEIGHTS ? (c) => runs.weightHeat(panel.trace, c) : (c) => word && runs.wordHeat(panel.trace, word, c);
    panel.stage.show({
      crops: view.crops,
      kindOf: (c, token) => runs.criterion(panel.trace, c, token, view.crops[c]),
      cursor: own,
      heat: view.crops.map((_, c) => heatOf(c)),
    });
    drawMetrics(panel, view);
    if (panel === leader) at = view.crops[state.crop].size;
  }
  drawToken();
  drawWords();
  drawTiles();
  drawGate(at);
  curves.move(at);
  drawAnswers();
  drawTimes();
  writeLink();
  performance.measure('redraw', 'draw');
}

function drawMetrics(panel, view) {
  const counts = { relevance: 0, coverage: 0, merged: 0, other: 0 };
  const kept = [];
  view.crops.forEach((crop, c) => {
    for (const token of crop.kept) {
      const kind = runs.criterion(panel.trace, c, token, crop);
      counts[kind in counts ? kind : 'other'] += 1;
      kept.push([c, token]);
    }
  });
  panel.root.dataset.kept = JSON.stringify(kept.sort((a, b) => a[0] - b[0] || a[1] - b[1]));
  const one = view.crops[state.crop];
  panel.root.dataset.relevance = one.relevance;
  panel.root.dataset.coverage = one.coverage;
  const part = (label, value) => { const span = element('span', {}, `${label} `); span.append(element('b', {}, String(value))); return span; };
  const { set } = panel;
  const parts = [part('kept', panel.trace.anytime ? kept.length : set.tokens)];
  if (panel.trace.anytime) {
    parts.push(part('●', counts.relevance), part('▲', counts.coverage));
    if (counts.other) parts.push(part('■', counts.other));
  } else {
    if (counts.merged) parts.push(part('■', counts.other), part('◆', counts.merged));
    if (set.cls) parts.push(part('CLS', set.cls));
    if (set.separators) parts.push(part('newlines', set.separators));
    const { alike, text, mean } = runs.layers(set.per_layer);
    if (!alike) parts.push(part('tokens × layers', text), part('mean', mean.toFixed(1)));
  }
  if (one.relevance !== undefined) parts.push(part('relevance', one.relevance.toFixed(4)), part('coverage', one.coverage.toFixed(4)));
  panel.metrics.replaceChildren(...parts);
}

function drawToken() {
  const panel = panels[cursor ? cursor.panel : 0];
  const view = panel && panel.view;
  const at = cursor || (view && state.frame !== null && view.now);
  if (!view || !at) {
    $('token').replaceChildren(element('p', { class: 'soft' }, state.frame === 0 ? 'Nothing is picked yet. Step on to see the first pick.' : 'Point at a token, or step through the film, to see when and why it was picked, what it covers and what it gained.'));
    return;
  }
  const { columns } = picture.crops[at.crop];
  const view1 = picture.crops.length > 1 ? `, view ${at.crop + 1}` : '';
  const head = `Token ${at.token}: row ${Math.floor(at.token / columns) + 1}, column ${(at.token % columns) + 1}${view1}`;
  const lines = runs.explain(panel.trace, at.crop, at.token, view.crops[at.crop], state.budget);
  $('token').replaceChildren(element('p', { class: 'soft' }, head), ...lines.map(([kind, text]) => element('p', { class: kind }, text)));
}

function drawWords() {
  const { trace, view } = panels[0];
  if (!view) return;
  if ($('weights')) $('weights').setAttribute('aria-pressed', String(state.word === WEIGHTS));
  [...$('words').querySelectorAll('button:not(#weights)')].forEach((button, at) => {
    const { held, share } = runs.wordRelevance(trace, trace.words[at], view.crops);
    button.setAttribute('aria-pressed', String(state.word === at));
    button.querySelector('i').style.width = `${100 * share}%`;
    const value = button.querySelector('.value');
    value.textContent = held.toFixed(3);
    value.dataset.value = held;
  });
}

function drawTiles() {
  const { view } = panels[0];
  if (!view || picture.crops.length < 2) return;
  const total = view.crops.reduce((sum, crop) => sum + crop.kept.size, 0) || 1;
  [...$('tiles').children].forEach((button, c) => {
    const size = view.crops[c].kept.size;
    button.setAttribute('aria-pressed', String(state.crop === c));
    button.querySelector('i').style.width = `${(100 * size) / total}%`;
    button.querySelector('.value').textContent = `${size} · ${Math.round((100 * size) / total)} %`;
  });
}

function drawGate(t) {
  const [leader] = stepped();
  if (!leader) {
    $('gate').textContent = `${panels[0].method} keeps its tokens without a support target: there are no steps to show.`;
    return;
  }
  const { trace } = leader;
  const crop = trace.crops[state.crop];
  const next = t < crop.k ? `; next pick by ${crop.criterion[t]}` : '';
  $('gate').textContent = `At ${t} tokens: coverage ${crop.coverage[t].toFixed(4)}, reference ${crop.reference[t].toFixed(4)}, target ${crop.target[t].toFixed(4)} (strictness ${crop.strictness.toFixed(3)})${next}.`;
  $('curves').setAttribute('aria-label', `Coverage, reference and target along the run. ${$('gate').textContent}`);
}

// A method inside the language model is counted by the mean over its layers, as the others may be too.
function counted(answer, tokens) {
  if (!answer) return String(tokens);
  const { alike, mean } = runs.layers(answer.per_layer);
  return alike ? String(answer.tokens) : `${mean.toFixed(1)} mean`;
}

function drawAnswers() {
  const row = (name, answer, tokens) => element('tr', {},
    element('td', {}, name),
    element('td', { class: answer ? 'answer' : 'waiting' }, answer ? answer.answer || '(nothing)' : waits.length ? '…' : '–'),
    element('td', { class: 'num' }, counted(answer, tokens)),
    element('td', { class: 'num' }, answer ? milliseconds(answer.seconds) : ''));
  $('answers').tBodies[0].replaceChildren(
    ...panels.map((panel) => row(panel.method, panel.answer && panel.answer.budget === state.budget ? panel.answer : null, state.budget)),
    row('all tokens', full && full.question === state.question && full.image === state.image ? full : null, picture ? picture.positions : ''),
  );
}

function drawTimes() {
  if (!picture) return;
  const rows = [['Encoding the picture, once', picture.seconds.encode], ['Preparing coverage, once', picture.seconds.prepare]];
  for (const { method, trace, set } of panels) {
    if (trace && trace.anytime) rows.push([`Selecting for every budget, ${method}`, trace.seconds]);
    else if (set) rows.push([`Selecting, ${method}`, set.seconds]);
  }
  if (full && panels[0].answer) rows.push(['Answer, all tokens / pruned', `${(full.seconds / panels[0].answer.seconds).toFixed(2)} ×`]);
  $('times').replaceChildren(...rows.flatMap(([name, value]) => [element('dt', {}, name), element('dd', {}, typeof value === 'string' ? value : milliseconds(value))]));
}

// --- film -----------------------------------------------------------------------------------------------------------

function stop() {
  if (playing !== null) cancelAnimationFrame(playing);
  playing = null;
  $('play').textContent = 'Play';
  $('play').setAttribute('aria-label', 'Play');
  $('play').setAttribute('aria-pressed', 'false');
}

function step(by) {
  if (!stepped().length) return false;
  const last = Number($('film').max);
  state.frame = Math.min(last, Math.max(0, (state.frame === null ? last : state.frame) + by));
  cursor = null;
  draw();
  return state.frame < last;
}

function play() {
  if (!stepped().length) return;
  if (playing !== null) {
    stop();
    return;
  }
  const last = Number($('film').max);
  if (state.frame === null || state.frame >= last) {
    state.frame = 0;
    draw();
  }
  $('play').textContent = 'Pause';
  $('play').setAttribute('aria-label', 'Pause');
  $('play').setAttribute('aria-pressed', 'true');
  // A film of any length takes ten seconds at most, and a short one lets every pick be seen.
  const gap = Math.min(400, 10000 / Math.max(1, last));
  let due = performance.now() + gap;
  const turn = (now) => {
    if (now >= due) {
      due = Math.max(due + gap, now);
      if (!step(1)) {
        stop();
        return;
      }
    }
    playing = requestAnimationFrame(turn);
  };
  playing = requestAnimationFrame(turn);
}

// --- controls -------------------------------------------------------------------------------------------------------

function setBudget(value) {
  if (!picture || !Number.isFinite(value)) return;
  stop();
  state.budget = Math.min(picture.capacity, Math.max(1, Math.round(value)));
  state.frame = null;
  draw();
  rest();
}

// Text that is not a number, or a number out of range: the box goes back to the budget in use.
function readCount() {
  const { value } = $('count');
  if (value !== '' && Number(value) !== state.budget) setBudget(Number(value));
  $('count').value = state.budget;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $('theme').textContent = theme === 'dark' ? 'Light' : 'Dark';
  if (picture && panels[0] && panels[0].trace) {
    buildCurves();
    draw();
  }
}

async function exportAs(form) {
  const query = { image: state.image, question: state.question, method: state.method, budget: state.budget, form };
  const blob = await attempt(() => api.exported(api.sameState(), query));
  if (!blob) return;
  const url = URL.createObjectURL(blob);
  const names = { svg: 'stacktok.svg', json: 'stacktok.json', python: 'stacktok_selection.py' };
  element('a', { href: url, download: names[form] }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
  $('export').open = false;
}

function wire() {
  $('form').addEventListener('submit', (event) => {
    event.preventDefault();
    state.question = $('question').value;
    state.frame = null;
    state.word = null;
    ask();
  });
  $('file').addEventListener('change', () => {
    const [file] = $('file').files;
    if (file) openFile(file);
    $('file').value = '';
  });
  $('budget').addEventListener('input', () => setBudget(Number($('budget').value)));
  $('count').addEventListener('change', readCount);
  // Text that is no number at all is not a change.
  $('count').addEventListener('blur', readCount);
  $('film').addEventListener('input', () => { stop(); state.frame = Number($('film').value); cursor = null; draw(); });
  $('back').addEventListener('click', () => { stop(); step(-1); });
  $('forth').addEventListener('click', () => { stop(); step(1); });
  $('play').addEventListener('click', play);
  $('theme').addEventListener('click', () => setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'));
  $('link').addEventListener('click', async () => {
    writeLink();
    try {
      await navigator.clipboard.writeText(location.href);
      $('link').textContent = 'Copied';
    } catch {
      // Without the right to the clipboard the address bar holds the same link.
      $('link').textContent = 'In the address bar';
    }
    setTimeout(() => { $('link').textContent = 'Copy link'; }, 1500);
  });
  for (const button of $('export').querySelectorAll('[data-form]')) button.addEventListener('click', () => exportAs(button.dataset.form));
  document.addEventListener('click', (event) => { if (!$('export').contains(event.target)) $('export').open = false; });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') $('export').open = false;
    const { tagName, type } = event.target;
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || tagName === 'SELECT' || (tagName === 'INPUT' && type !== 'file')) return;
    if (event.key === 'ArrowRight' || event.key === 'ArrowLeft') {
      event.preventDefault();
      stop();
      step(event.key === 'ArrowRight' ? 1 : -1);
    } else if (event.key === ' ' && tagName !== 'BUTTON' && tagName !== 'SUMMARY') {
      event.preventDefault();
      play();
    }
  });
  addEventListener('dragover', (event) => { event.preventDefault(); $('drop').hidden = false; });
  addEventListener('dragleave', (event) => { if (!event.relatedTarget) $('drop').hidden = true; });
  addEventListener('drop', (event) => {
    event.preventDefault();
    $('drop').hidden = true;
    const [file] = event.dataTransfer.files;
    if (file) openFile(file);
  });
  addEventListener('hashchange', () => { readLink(); $('question').value = state.question; open(state.image); });
}

function openFile(file) {
  state.word = null;
  state.frame = null;
  state.crop = 0;
  open(null, file);
}

async function start() {
  setTheme(matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  wire();
  info = await api.info();
  $('model').textContent = `${info.model} (${info.family})`;
  readLink();
  $('question').value = state.question;
  buildPanels();
  buildSamples();
  if (state.image) await open(state.image);
  else say('Open a picture, or drop one here.');
}

attempt(start);
