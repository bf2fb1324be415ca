// Requests of this page. A new state has a new serial; the server drops what an older state asked for.

const page = crypto.randomUUID ? crypto.randomUUID() : String(Math.random()).slice(2);
let serial = 0;

export class Stale extends Error {}

export function newState() {
  serial += 1;
  return serial;
}

export const sameState = () => serial;
export const current = (own) => own === serial;

async function reach(path, options = {}) {
  try {
    return await fetch(path, options);
  } catch {
    throw new Error('The server does not answer. Start `stacktok view` again, then reload this page.');
  }
}

async function send(path, own, options = {}) {
  const response = await reach(path, {
    ...options,
    headers: { 'X-Page': page, 'X-Serial': String(own), ...options.headers },
  });
  if (response.status === 409 || own !== serial) throw new Stale();
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new Error(typeof body.detail === 'string' ? body.detail : `The server said ${response.status}.`);
  }
  return response;
}

function post(path, own, body) {
  return send(path, own, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify(body),
  });
}

export const info = async () => (await reach('api/info')).json();
export const image = async (own, name) => (await send(`api/images/${encodeURIComponent(name)}`, own)).json();
export const upload = async (own, file) =>
  (await send('api/images', own, { method: 'POST', headers: { 'Content-Type': 'application/octet-stream' }, body: file })).json();
export const trace = async (own, query) => (await post('api/trace', own, query)).json();
export const kept = async (own, query) => (await post('api/kept', own, query)).json();
export const answer = async (own, query) => (await post('api/answer', own, query)).json();
export const fullAnswer = async (own, query) => (await post('api/answer/full', own, query)).json();
export const exported = async (own, query) => (await post('api/export', own, query)).blob();
export const cropUrl = (name, crop) => `api/images/${encodeURIComponent(name)}/crops/${crop}.png`;
export const sampleUrl = (name) => `api/samples/${encodeURIComponent(name)}.png`;
