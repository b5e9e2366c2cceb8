// Interactive charts: smoothing, log scale, hidden runs, and values at a cursor of pointer or keyboard.

const SVG = 'http://www.w3.org/2000/svg';
const N_TICKS = 4;
const view = { smoothing: 0, log: false, hidden: new Set(), added: [], filter: '' };
let data = null;
let curves = new Map(); // by run and key

function svg(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function html(name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function loadData(text) {
  data = JSON.parse(text);
  curves = new Map(data.curves.map((curve) => [`${curve.run} ${curve.key}`, { ...curve, x: data.steps[curve.x] }]));
}

function number(value) {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return '0';
  if (size >= 1000 && size < 1e9) return Math.round(value).toLocaleString('en-US');
  if (size >= 1e-4 && size < 1000) return String(Number(value.toPrecision(4)));
  return Number(value.toPrecision(3)).toExponential();
}

// Exponential moving average without the bias of its start.
function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function linesOf(chart) {
  return chart.lines
    .filter((line) => !view.hidden.has(line.run))
    .map((line) => ({ ...line, curve: curves.get(`${line.run} ${line.key}`) }))
    .filter((line) => line.curve)
    .map((line) => ({ ...line, y: smoothed(line.curve.y, view.smoothing) }));
}

// Return the functions from steps and values to positions between 0 and 1; null without points.
function axesOf(lines) {
  const isLog = view.log && lines.some((line) => line.y.some((value) => value > 0));
  const scale = isLog ? (value) => (value > 0 ? Math.log10(value) : NaN) : (value) => value;
  let [first, last, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const line of lines) {
    for (let i = 0; i < line.y.length; i++) {
      const value = scale(line.y[i]);
      if (Number.isNaN(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
      first = Math.min(first, line.curve.x[i]);
      last = Math.max(last, line.curve.x[i]);
    }
  }
  if (first > last) return null;
  last = Math.max(last, first + 1);
  const margin = 0.06 * (high - low) || 0.06 * Math.abs(high) || 1;
  [low, high] = [low - margin, high + margin];
  const x = (step) => (step - first) / (last - first);
  const y = (value) => (high - scale(value)) / (high - low);
  const ticks = isLog ? logTicks(low, high) : niceTicks(low, high);
  return { first, last, x, y, ticks };
}

function niceTicks(low, high) {
  const span = high - low;
  const size = 10 ** Math.floor(Math.log10(span / N_TICKS));
  const part = [1, 2, 2.5, 5].find((each) => span / (size * each) <= N_TICKS + 0.5) || 10;
  const step = size * part;
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high && ticks.length < 12; i++) ticks.push(i * step);
  return ticks.map((tick) => (Math.abs(tick) < step * 1e-9 ? 0 : tick));
}

function logTicks(low, high) {
  const parts = high - low > 2 ? [1] : [1, 2, 5];
  const every = Math.max(1, Math.ceil((high - low) / 6));
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power += every) {
    for (const part of parts) {
      const value = power + Math.log10(part);
      if (value >= low && value <= high) ticks.push(part * 10 ** power);
    }
  }
  return ticks;
}

function pointsOf(steps, values, axes) {
  const points = [];
  for (let i = 0; i < values.length; i++) {
    const y = axes.y(values[i]);
    if (!Number.isNaN(y)) points.push(`${(1000 * axes.x(steps[i])).toFixed(1)},${(1000 * y).toFixed(1)}`);
  }
  return points;
}

function drawLine(line, axes, plane, frame) {
  const { x, y: raw, low, high } = line.curve;
  const classes = `c${line.colour} d${Math.min(line.dash, 3)}`;
  if (low && !view.smoothing) {
    const band = [...pointsOf(x, high, axes), ...pointsOf(x, low, axes).reverse()];
    svg('polygon', { class: `band f${line.colour}`, points: band.join(' ') }, plane);
  }
  if (view.smoothing) svg('polyline', { class: `line raw c${line.colour}`, points: pointsOf(x, raw, axes).join(' ') }, plane);
  const points = pointsOf(x, line.y, axes);
  svg('polyline', { class: `line ${classes}`, points: points.join(' ') }, plane);
  if (points.length === 1) {
    const [px, py] = points[0].split(',');
    svg('circle', { class: `dot c${line.colour}`, cx: `${px / 10}%`, cy: `${py / 10}%`, r: 3.5 }, frame);
  }
}

function drawChart(figure, chart) {
  const plot = figure.querySelector('.plot');
  const lines = linesOf(chart);
  const axes = axesOf(lines);
  const frame = svg('svg', { class: 'frame', 'aria-hidden': 'true' });
  if (axes) {
    for (const tick of axes.ticks) {
      const y = `${(100 * axes.y(tick)).toFixed(2)}%`;
      svg('line', { class: 'grid', x1: 0, x2: '100%', y1: y, y2: y }, frame);
      svg('text', { class: 'tick', x: -8, y, dy: 4, 'text-anchor': 'end' }, frame).textContent = number(tick);
    }
    for (const [at, anchor, text] of [['0', 'start', number(axes.first)], ['50%', 'middle', 'step'], ['100%', 'end', number(axes.last)]]) {
      svg('text', { class: 'tick', x: at, y: '100%', dy: 18, 'text-anchor': anchor }, frame).textContent = text;
    }
    const plane = svg('svg', { class: 'plane', viewBox: '0 0 1000 1000', preserveAspectRatio: 'none' }, frame);
    lines.forEach((line) => drawLine(line, axes, plane, frame));
  } else {
    svg('text', { class: 'tick', x: '50%', y: '50%', 'text-anchor': 'middle' }, frame).textContent = 'no values to draw';
  }
  const tip = html('div', 'tip');
  tip.hidden = true;
  tip.setAttribute('role', 'status');
  plot.replaceChildren(frame, tip);
  plot.tabIndex = 0;
  plot.setAttribute('role', 'group');
  plot.setAttribute('aria-label', `${chart.title}: chart. Arrow keys move the cursor over the steps.`);
  figure.state = { chart, lines, axes, frame, tip, cursor: null };
  drawLegend(figure, chart, lines);
}

function drawLegend(figure, chart, lines) {
  const legend = figure.querySelector('.legend');
  legend.hidden = chart.lines.length === 1 && data.runs.length === 1;
  legend.replaceChildren(...lines.map((line) => {
    const key = html('span', 'key');
    key.append(html('i', `swatch b${line.colour}`), line.label);
    if (lines.length > 1) key.append(html('b', '', number(line.y[line.y.length - 1])));
    return key;
  }));
  const caption = figure.querySelector('figcaption');
  let now = caption.querySelector('.now');
  if (!now) {
    now = html('span', 'now');
    caption.querySelector('h4').after(now);
    const unit = caption.querySelector('.unit');
    if (unit) now.before(unit);
  }
  now.textContent = lines.length === 1 ? number(lines[0].y[lines[0].y.length - 1]) : '';
}

// Return the index of the point that is nearest to a step.
function nearest(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle;
    else high = middle;
  }
  return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
}

function moveCursor(figure, step) {
  const { lines, axes, frame, tip } = figure.state;
  frame.querySelectorAll('.cursor, .cursor-dot').forEach((element) => element.remove());
  tip.hidden = step === null || !axes;
  figure.state.cursor = tip.hidden ? null : step;
  if (tip.hidden) return;
  const x = axes.x(step);
  svg('line', { class: 'cursor', x1: `${100 * x}%`, x2: `${100 * x}%`, y1: 0, y2: '100%' }, frame);
  const rows = lines.map((line) => {
    const i = nearest(line.curve.x, step);
    const y = axes.y(line.y[i]);
    if (!Number.isNaN(y)) {
      svg('circle', { class: `dot cursor-dot c${line.colour}`, cx: `${100 * axes.x(line.curve.x[i])}%`, cy: `${100 * y}%`, r: 3.5 }, frame);
    }
    const row = html('div');
    const raw = view.smoothing ? ` (${number(line.curve.y[i])})` : '';
    const range = line.curve.low && !view.smoothing ? ` [${number(line.curve.low[i])}, ${number(line.curve.high[i])}]` : '';
    row.append(html('i', `swatch b${line.colour}`), html('span', '', line.label), html('em', '', number(line.y[i]) + raw + range));
    return row;
  });
  tip.replaceChildren(html('b', '', `step ${number(step)}`), ...rows);
  tip.style.left = x < 0.5 ? `calc(${100 * x}% + 10px)` : 'auto';
  tip.style.right = x < 0.5 ? 'auto' : `calc(${100 - 100 * x}% + 10px)`;
}

function stepsOf(lines) {
  return [...new Set(lines.flatMap((line) => line.curve.x))].sort((a, b) => a - b);
}

function onPointer(figure, event) {
  const { lines, axes } = figure.state;
  if (!axes) return;
  const box = figure.querySelector('.plot').getBoundingClientRect();
  const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  const steps = stepsOf(lines);
  moveCursor(figure, steps[nearest(steps, axes.first + part * (axes.last - axes.first))]);
}

function onKey(figure, event) {
  const { lines, axes, cursor } = figure.state;
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  if (event.key === 'Escape') return moveCursor(figure, null);
  if (!(event.key in moves) || !axes) return undefined;
  event.preventDefault();
  const steps = stepsOf(lines);
  const now = cursor === null ? (moves[event.key] > 0 ? -1 : steps.length) : nearest(steps, cursor);
  return moveCursor(figure, steps[Math.min(steps.length - 1, Math.max(0, now + moves[event.key]))]);
}

function newFigure(chart) {
  const figure = html('figure', 'card chart');
  figure.dataset.chart = chart.id;
  const caption = html('figcaption');
  caption.append(html('h4', '', chart.title));
  if (chart.unit) caption.append(html('span', 'unit', chart.unit));
  if (chart.text) {
    caption.append(html('p', '', chart.text));
    caption.lastChild.title = chart.text;
  }
  figure.append(caption, html('div', 'plot'), html('div', 'legend'));
  return figure;
}

// Add the charts that are not on the page yet, and draw all of them.
function drawCharts() {
  const root = document.getElementById('charts');
  if (!root) return;
  for (const chart of [...data.charts, ...view.added]) {
    let figure = root.querySelector(`[data-chart="${CSS.escape(chart.id)}"]`);
    if (!figure) {
      let heading = [...root.querySelectorAll('.group')].find((each) => each.textContent === chart.section);
      if (!heading) {
        heading = html('h3', 'group', chart.section);
        root.append(heading, html('div', 'grid'));
      }
      figure = newFigure(chart);
      heading.nextElementSibling.append(figure);
    }
    const plot = figure.querySelector('.plot');
    if (!figure.state) {
      plot.addEventListener('pointermove', (event) => onPointer(figure, event));
      plot.addEventListener('pointerdown', (event) => onPointer(figure, event));
      plot.addEventListener('pointerleave', () => moveCursor(figure, null));
      plot.addEventListener('blur', () => moveCursor(figure, null));
      plot.addEventListener('keydown', (event) => onKey(figure, event));
    }
    const cursor = figure.state ? figure.state.cursor : null;
    drawChart(figure, chart);
    if (cursor !== null) moveCursor(figure, cursor);
    const words = `${chart.title} ${chart.lines.map((line) => line.key).join(' ')}`.toLowerCase();
    figure.hidden = !words.includes(view.filter);
  }
  for (const heading of root.querySelectorAll('.group')) {
    heading.hidden = [...heading.nextElementSibling.children].every((figure) => figure.hidden);
  }
}

function addChart(key) {
  const { name, unit, text } = data.names[key];
  const lines = data.runs.map((run, i) => ({ key, run: i, label: data.runs.length > 1 ? run : name, colour: i % 10, dash: 0 }));
  const chart = { id: `added-${key}`, section: 'Added', title: name, unit, text, lines: lines.filter((line) => curves.has(`${line.run} ${key}`)) };
  if (!view.added.some((other) => other.id === chart.id)) view.added.push(chart);
  drawCharts();
  const figure = document.querySelector(`[data-chart="${CSS.escape(chart.id)}"]`);
  figure.scrollIntoView({ block: 'center' });
  figure.querySelector('.plot').focus({ preventScroll: true });
}
