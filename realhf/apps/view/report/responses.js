// The browser of responses: choice of step, search, and differences between two steps.

const PAGE = 24; // rows that are added at a time
const MAX_CELLS = 4e6; // of the table of a word-wise comparison
const chosen = { run: 0, step: 'last', other: '', search: '', n: PAGE };

function stepPart(step) {
  const steps = data.responses[chosen.run] || [];
  if (step === 'last') return steps[steps.length - 1];
  return steps.find((part) => String(part.step) === String(step));
}

// Append a text; parts that contain the search text are marked.
function appendMarked(parent, text, search) {
  const lower = text.toLowerCase();
  const isSameLength = lower.length === text.length;
  let start = 0;
  for (let at = search && isSameLength ? lower.indexOf(search) : -1; at >= 0; at = lower.indexOf(search, start)) {
    parent.append(text.slice(start, at), html('mark', '', text.slice(at, at + search.length)));
    start = at + search.length;
  }
  parent.append(text.slice(start));
}

function textBox(className, text, search) {
  const box = html('div', className);
  box.dir = 'auto';
  appendMarked(box, text, search);
  return box;
}

// The turns of an episode; those of the environment are not trained on.
function turnsBox(turns, search) {
  const box = html('div', 'answer');
  box.dir = 'auto';
  for (const [isEnvironment, text, reward] of turns) {
    const part = html('span', isEnvironment ? 'environment' : 'model');
    if (isEnvironment) part.title = 'environment: not trained on';
    appendMarked(part, text, search);
    box.append(part);
    if (reward) box.append(html('b', 'turn-reward', ` ${number(reward)} `));
  }
  return box;
}

function answerBox(row, search) {
  return row.x ? turnsBox(row.x, search) : textBox('answer', row.r, search);
}

function metaOf(row, step) {
  const meta = html('div', 'meta');
  const add = (name, value) => {
    const span = html('span', '', name ? `${name} ` : '');
    span.append(html('b', '', value));
    meta.append(span);
  };
  add('step', String(step));
  add('sample', String(row.s));
  if (row.w !== undefined) add('reward', number(row.w));
  if (row.n !== undefined) add('tokens', number(row.n));
  if (row.t) add('', 'truncated');
  if (row.o) add('', `${row.o.toLocaleString('en-US')} characters left out`);
  return meta;
}

function card(row, step, search) {
  const article = html('article', 'card response');
  article.append(textBox('prompt', row.p, search), metaOf(row, step), answerBox(row, search));
  return article;
}

// Return runs of words as [kind, text], where kind is ' ', '-' (only before) or '+' (only after).
function wordDiff(before, after) {
  const split = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
  const [a, b] = [split(before), split(after)];
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const middle = middleDiff(a.slice(head, a.length - tail), b.slice(head, b.length - tail));
  const runs = [];
  for (const [kind, word] of [...a.slice(0, head).map((w) => [' ', w]), ...middle, ...a.slice(a.length - tail).map((w) => [' ', w])]) {
    if (runs.length && runs[runs.length - 1][0] === kind) runs[runs.length - 1][1] += word;
    else runs.push([kind, word]);
  }
  return runs;
}

function middleDiff(a, b) {
  const width = b.length + 1;
  if ((a.length + 1) * width > MAX_CELLS) return [...a.map((w) => ['-', w]), ...b.map((w) => ['+', w])];
  const common = new Uint16Array((a.length + 1) * width); // length of the longest common subsequence of the rests
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i * width + j] = a[i] === b[j] ? common[(i + 1) * width + j + 1] + 1
        : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const runs = [];
  let [i, j] = [0, 0];
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) {
      runs.push([' ', a[i++]]);
      j++;
    } else if (common[(i + 1) * width + j] >= common[i * width + j + 1]) runs.push(['-', a[i++]]);
    else runs.push(['+', b[j++]]);
  }
  return [...runs, ...a.slice(i).map((w) => ['-', w]), ...b.slice(j).map((w) => ['+', w])];
}

function diffBox(runs, own) {
  const box = html('div', 'answer');
  box.dir = 'auto';
  for (const [kind, text] of runs) {
    if (kind === ' ') box.append(text);
    else if (kind === own) box.append(html(own === '+' ? 'ins' : 'del', '', text));
  }
  return box;
}

function pairCard(before, after, steps, search, isSame) {
  const article = html('article', 'card response paired');
  const pair = html('div', 'pair');
  const runs = isSame ? wordDiff(before.r, after.r) : null;
  [[before, '-'], [after, '+']].forEach(([row, kind], i) => {
    const side = html('div');
    if (!isSame) side.append(textBox('prompt', row.p, search));
    side.append(metaOf(row, steps[i]), runs ? diffBox(runs, kind) : answerBox(row, search));
    pair.append(side);
  });
  if (isSame) article.append(textBox('prompt', before.p, search));
  article.append(pair);
  return article;
}

// Pair the rows of two steps by prompt, in order of their samples; by position if no prompt occurs in both.
function pairs(before, after) {
  const waiting = new Map();
  for (const row of before.rows) waiting.set(row.p, [...(waiting.get(row.p) || []), row]);
  const found = [];
  for (const row of after.rows) {
    const own = waiting.get(row.p);
    if (own && own.length) found.push([own.shift(), row]);
  }
  if (found.length) return { found, isSame: true };
  const n = Math.min(before.rows.length, after.rows.length);
  return { found: before.rows.slice(0, n).map((row, i) => [row, after.rows[i]]), isSame: false };
}

function matches(search, ...rows) {
  return !search || rows.some((row) => row.p.toLowerCase().includes(search) || row.r.toLowerCase().includes(search));
}

function cardsOf(search) {
  if (chosen.step === 'all') {
    const rows = (data.responses[chosen.run] || []).flatMap((part) => part.rows.map((row) => [row, part.step]));
    return { cards: rows.filter(([row]) => matches(search, row)).map(([row, step]) => () => card(row, step, search)), note: '' };
  }
  const part = stepPart(chosen.step);
  if (!part) return { cards: [], note: '' };
  const other = chosen.other === '' ? null : stepPart(chosen.other);
  if (!other || other === part) {
    const rows = part.rows.filter((row) => matches(search, row));
    return { cards: rows.map((row) => () => card(row, part.step, search)), note: '' };
  }
  const [before, after] = other.step < part.step ? [other, part] : [part, other];
  const { found, isSame } = pairs(before, after);
  const shown = found.filter((both) => matches(search, ...both));
  const note = isSame ? '' : `Steps ${before.step} and ${after.step} have no prompt in common: rows are side by side in their order. `;
  return { cards: shown.map(([a, b]) => () => pairCard(a, b, [before.step, after.step], search, isSame)), note };
}

function drawResponses() {
  const list = document.getElementById('response-list');
  const count = document.getElementById('response-count');
  const { cards, note } = cardsOf(chosen.search.toLowerCase());
  list.replaceChildren(...cards.slice(0, chosen.n).map((make) => make()));
  count.textContent = cards.length ? `${note}${cards.length} ${cards.length === 1 ? 'entry' : 'entries'}` : 'No responses match.';
  if (cards.length > chosen.n) {
    const more = html('button', '', `Show more (${cards.length - chosen.n})`);
    more.type = 'button';
    more.addEventListener('click', () => {
      const next = chosen.n;
      chosen.n += PAGE;
      drawResponses();
      if (list.children[next]) {
        list.children[next].tabIndex = -1;
        list.children[next].focus();
      }
    });
    list.append(more);
  }
  for (const box of list.querySelectorAll('.prompt, .answer')) {
    if (box.scrollHeight > box.clientHeight + 1) box.tabIndex = 0;
  }
}

function fillSelect(select, entries, value) {
  select.replaceChildren(...entries.map(([key, text]) => {
    const option = html('option', '', text);
    option.value = key;
    return option;
  }));
  const keys = entries.map(([key]) => key);
  select.value = keys.includes(value) ? value : keys[0];
  return select.value;
}

function fillResponseTools() {
  const get = (name) => document.getElementById(`response-${name}`);
  const runs = data.runs.map((name, i) => [String(i), name]).filter(([i]) => data.responses[Number(i)].length);
  document.getElementById('response-tools').hidden = !runs.length;
  if (!runs.length) return;
  get('run-label').hidden = runs.length < 2;
  chosen.run = Number(fillSelect(get('run'), runs, String(chosen.run)));
  const steps = data.responses[chosen.run].map((part) => String(part.step)).reverse();
  const numbered = steps.map((step) => [step, step]);
  chosen.step = fillSelect(get('step'), [['last', `last (${steps[0]})`], ['all', 'all steps'], ...numbered], chosen.step);
  chosen.other = fillSelect(get('other'), [['', 'no other step'], ...numbered], chosen.other);
  get('other').disabled = chosen.step === 'all';
  drawResponses();
}

function startResponses() {
  for (const name of ['run', 'step', 'other']) {
    document.getElementById(`response-${name}`).addEventListener('change', (event) => {
      chosen[name] = name === 'run' ? Number(event.target.value) : event.target.value;
      chosen.n = PAGE;
      fillResponseTools();
    });
  }
  document.getElementById('response-search').addEventListener('input', (event) => {
    chosen.search = event.target.value;
    chosen.n = PAGE;
    drawResponses();
  });
  fillResponseTools();
}
