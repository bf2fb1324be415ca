// What a run keeps at every budget, and how it came to it. Pure functions on the server's data.

export function unpack({ shape, float32 }) {
  const bytes = Uint8Array.from(atob(float32), (character) => character.charCodeAt(0));
  return { rows: shape[0], columns: shape[1], values: new Float32Array(bytes.buffer) };
}

// Adds the look-ups that drawing needs: a token's place in its crop's run, and in the whole.
export function index(trace) {
  trace.affinity = trace.query_affinity.map(unpack);
  if (!trace.anytime) return trace;
  trace.rank = trace.crops.map((crop) => new Int32Array(crop.n).fill(-1));
  trace.order.forEach(([crop, token], at) => { trace.rank[crop][token] = at; });
  for (const crop of trace.crops) {
    crop.at = new Int32Array(crop.n).fill(-1);
    crop.order.forEach((token, at) => { crop.at[token] = at; });
    crop.bySize = new Map(crop.refined.map((entry) => [entry.k, entry]));
  }
  return trace;
}

function sizesAt(trace, k) {
  const sizes = trace.crops.map(() => 0);
  for (let at = 0; at < k; at += 1) sizes[trace.order[at][0]] += 1;
  return sizes;
}

function plain(crop, size) {
  const owners = new Int32Array(crop.n).fill(-1);
  for (let at = 0; at < size; at += 1) {
    for (let i = crop.changed_offsets[at]; i < crop.changed_offsets[at + 1]; i += 1) owners[crop.changed_rows[i]] = crop.order[at];
  }
  return { size, kept: new Set(crop.order.slice(0, size)), owners, relevance: crop.relevance[size], coverage: crop.coverage[size], swaps: [] };
}

// The kept set at a budget, swaps included: what a run with that budget keeps.
export function keptAt(trace, k) {
  return sizesAt(trace, k).map((size, c) => {
    const refined = trace.crops[c].bySize.get(size);
    if (!refined) return plain(trace.crops[c], size);
    return {
      size, kept: new Set(refined.indices), owners: Int32Array.from(refined.owners),
      relevance: refined.relevance, coverage: refined.coverage, swaps: refined.swaps,
    };
  });
}

// Frames of the film: one per pick, then one per swap.
export function frames(trace, k) {
  return k + keptAt(trace, k).reduce((sum, crop) => sum + crop.swaps.length, 0);
}

export function frameAt(trace, k, frame) {
  const last = frames(trace, k);
  if (frame >= last) return { crops: keptAt(trace, k), now: last > k ? swapAt(trace, k, last - k) : pick(trace, k) };
  if (frame <= k) return { crops: sizesAt(trace, frame).map((size, c) => plain(trace.crops[c], size)), now: pick(trace, frame) };
  const crops = sizesAt(trace, k).map((size, c) => plain(trace.crops[c], size));
  let left = frame - k;
  keptAt(trace, k).forEach((final, c) => {
    for (const [out, into] of final.swaps) {
      if (left <= 0) return;
      crops[c].kept.delete(out);
      crops[c].kept.add(into);
      crops[c].owners = crops[c].owners.map((owner) => (owner === out ? -1 : owner));
      left -= 1;
    }
  });
  return { crops, now: swapAt(trace, k, frame - k) };
}

function pick(trace, k) {
  return k ? { crop: trace.order[k - 1][0], token: trace.order[k - 1][1] } : null;
}

function swapAt(trace, k, count) {
  let left = count;
  const final = keptAt(trace, k);
  for (let c = 0; c < final.length; c += 1) {
    for (const swap of final[c].swaps) {
      left -= 1;
      if (left === 0) return { crop: c, token: swap[1], swap };
    }
  }
  return null;
}

// The kept set of a method whose runs have no prefixes, as the server sent it; merged tokens are regions.
export function fixed(set, sizes) {
  const regions = set.merged.map(({ token, sources }) => ({ crop: token[0], token: token[1], size: sources.length, sources }));
  return set.crops.map((crop, c) => {
    const region = new Int32Array(sizes[c]).fill(-1);
    regions.forEach(({ sources }, at) => { for (const [own, token] of sources) if (own === c) region[token] = at; });
    return { ...crop, size: crop.indices.length, kept: new Set(crop.indices), owners: Int32Array.from(crop.owners), swaps: [], region, regions };
  });
}

// The region that a token was merged into, or undefined.
export function regionOf(state, token) {
  return state.region && state.regions[state.region[token]];
}

// 576 for two layers, then 64 for four, and the mean that makes methods comparable.
export function layers(perLayer) {
  const runs = [];
  for (const count of perLayer) {
    if (runs.length && runs[runs.length - 1][0] === count) runs[runs.length - 1][1] += 1;
    else runs.push([count, 1]);
  }
  const mean = perLayer.reduce((sum, count) => sum + count, 0) / Math.max(1, perLayer.length);
  return { alike: runs.length < 2, text: runs.map(([count, times]) => `${count} × ${times}`).join(', '), mean };
}

export function criterion(trace, c, token, state) {
  if (!trace.anytime) {
    const region = regionOf(state, token);
    return region && region.crop === c && region.token === token ? 'merged' : 'other';
  }
  const at = trace.crops[c].at[token];
  return at >= 0 && at < state.size ? trace.crops[c].criterion[at] : 'other';
}

// A word's relevance: the best kept affinity of its rows beside the best that any token has.
export function wordRelevance(trace, word, crops) {
  let held = 0;
  let best = 0;
  for (const row of word.rows) {
    let own = 0;
    let top = 0;
    crops.forEach((crop, c) => {
      const { columns, values } = trace.affinity[c];
      for (let token = 0; token < columns; token += 1) {
        const value = values[row * columns + token];
        if (value > top) top = value;
        if (value > own && crop.kept.has(token)) own = value;
      }
    });
    held += own;
    best += top;
  }
  return { held: held / Math.max(1, word.rows.length), share: best ? held / best : 0 };
}

// The weights of a crop's tokens; null for a method that has none.
export function weightHeat(trace, c) {
  return (trace.anytime && trace.crops[c].row_weights) || null;
}

export function wordHeat(trace, word, c) {
  const { columns, values } = trace.affinity[c];
  const heat = new Float32Array(columns);
  for (const row of word.rows) for (let token = 0; token < columns; token += 1) heat[token] += values[row * columns + token];
  return heat;
}

export function ordinal(number) {
  const tens = number % 100;
  if (tens > 10 && tens < 14) return `${number}th`;
  return `${number}${{ 1: 'st', 2: 'nd', 3: 'rd' }[number % 10] || 'th'}`;
}

// When and why a token was picked, what it covers, what it gained.
export function explain(trace, c, token, state, k) {
  const lines = [];
  const kept = state.kept.has(token);
  const covers = state.owners.reduce((sum, owner) => sum + (owner === token), 0);
  const region = regionOf(state, token);
  if (region) {
    const itself = kept && region.crop === c && region.token === token;
    const place = region.crop < 0 ? 'a newline' : region.crop === c ? `token ${region.token}` : `token ${region.token} of view ${region.crop + 1}`;
    lines.push(['why', itself ? `Made of ${region.size} tokens (outlined).` : `Merged with ${region.size - 1} others, at the place of ${place}.`]);
    if (!itself) return lines;
  } else if (!trace.anytime) {
    lines.push(['why', kept ? 'Kept.' : 'Dropped.']);
  } else {
    const crop = trace.crops[c];
    const at = crop.at[token];
    const swap = state.swaps.find((entry) => entry[1] === token);
    const gone = state.swaps.find((entry) => entry[0] === token);
    if (at < 0) {
      lines.push(['why', 'Padding: it may not be kept.']);
      return lines;
    }
    const rank = ordinal(trace.rank[c][token] + 1);
    if (swap && kept) {
      lines.push(['why', `Swapped in for token ${swap[0]}.`], ['', `R + C rose from ${swap[2].toFixed(4)} to ${swap[3].toFixed(4)}.`]);
    } else {
      lines.push(['why', kept ? `Picked ${rank} of ${k}, by ${crop.criterion[at]}.`
        : gone ? `Picked ${rank}, then swapped out for token ${gone[1]}.`
          : `Dropped at ${k}; would be picked ${rank}, by ${crop.criterion[at]}.`]);
      lines.push(['', reason(crop, at)]);
      const relevance = crop.relevance[at + 1] - crop.relevance[at];
      const coverage = crop.coverage[at + 1] - crop.coverage[at];
      lines.push(['', `Gains: relevance +${relevance.toFixed(5)}, coverage +${coverage.toFixed(5)}.`]);
    }
  }
  if (kept) {
    lines.push(['', `Covers ${covers} position${covers === 1 ? '' : 's'} best${region ? '' : ' (outlined)'}.`]);
  } else if (state.owners[token] >= 0) {
    lines.push(['soft', `Its place is covered best by token ${state.owners[token]}.`]);
  }
  const words = trace.words.filter((word) => word.rows.some((row) => {
    const { columns, values } = trace.affinity[c];
    let top = token;
    for (const other of state.kept) if (values[row * columns + other] > values[row * columns + top]) top = other;
    return kept && top === token;
  }));
  if (words.length) lines.push(['', `Serves best: ${words.map((word) => `“${word.text}”`).join(', ')}.`]);
  return lines;
}

function reason(crop, at) {
  const coverage = crop.coverage[at].toFixed(4);
  const target = crop.target[at].toFixed(4);
  if (crop.criterion[at] === 'scalarized') return 'The largest gain of relevance + α · coverage.';
  if (crop.row_weights && crop.criterion[at] === 'relevance') return 'The largest gain of weighted coverage.';
  if (crop.criterion[at] === 'relevance') return `Support held (coverage ${coverage} ≥ target ${target}), so relevance chose.`;
  if (crop.criterion[at] === 'fill') return 'Nothing gained any more; the lowest index filled the budget.';
  if (crop.bound[at]) return `Coverage ${coverage} lay below the target ${target}, so coverage chose.`;
  return crop.m ? 'No token added relevance any more, so coverage chose.' : 'No query words, so coverage chose.';
}
