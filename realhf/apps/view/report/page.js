// Starts the interactive parts of the page, and with `realhf report --follow` loads what has changed.

const POLL_TIMEOUT_MS = 60000;
let version = null; // of the page, as the server names it

function drawRunLegend() {
  const legend = document.getElementById('run-legend');
  if (!legend) return;
  legend.hidden = data.runs.length < 2;
  const isFocused = legend.contains(document.activeElement) ? document.activeElement.dataset.run : null;
  legend.replaceChildren(...data.runs.map((name, i) => {
    const label = html('label', 'key');
    const box = html('input');
    box.type = 'checkbox';
    box.checked = !view.hidden.has(i);
    box.dataset.run = i;
    box.addEventListener('change', () => {
      if (box.checked) view.hidden.delete(i);
      else view.hidden.add(i);
      drawCharts();
    });
    label.append(box, html('i', `swatch b${i % 10}`), name);
    return label;
  }));
  if (isFocused !== null) legend.querySelector(`[data-run="${isFocused}"]`).focus();
}

function startCurves() {
  const tools = document.getElementById('curve-tools');
  if (!tools) return;
  tools.hidden = false;
  const smoothing = document.getElementById('smoothing');
  smoothing.addEventListener('input', () => {
    view.smoothing = Number(smoothing.value);
    document.getElementById('smoothing-value').textContent = smoothing.value;
    drawCharts();
  });
  document.getElementById('log-scale').addEventListener('change', (event) => {
    view.log = event.target.checked;
    drawCharts();
  });
  document.getElementById('chart-filter').addEventListener('input', (event) => {
    view.filter = event.target.value.trim().toLowerCase();
    drawCharts();
  });
}

function startChartButtons() {
  for (const button of document.querySelectorAll('.add-chart')) {
    button.hidden = !document.getElementById('charts') || !data.names[button.dataset.key];
    button.onclick = () => addChart(button.dataset.key);
  }
}

// A region that scrolls can be reached by the keyboard; one that does not is no stop of the tab key.
function updateRegions() {
  for (const region of document.querySelectorAll('.scroll, main pre')) {
    const scrolls = region.scrollWidth > region.clientWidth + 1 || region.scrollHeight > region.clientHeight + 1;
    if (scrolls) region.tabIndex = 0;
    else region.removeAttribute('tabindex');
  }
}

function showNote(text) {
  const note = document.getElementById('live-note');
  note.hidden = !text;
  note.textContent = text;
}

function noteText() {
  const made = document.getElementById('footer').textContent.match(/Made (.*? UTC)/);
  return `Live, last change ${made ? made[1] : ''}.`;
}

// Replace the parts of the page that differ; open details, the scroll position and the focus stay.
function applyPage(text) {
  const fresh = new DOMParser().parseFromString(text, 'text/html');
  const payload = fresh.getElementById('data').textContent;
  for (const part of document.querySelectorAll('[data-live]')) {
    const other = fresh.getElementById(part.id);
    if (!other || (part.source || part.innerHTML) === other.innerHTML) continue;
    const states = new Map([...part.querySelectorAll('details[id]')].map((each) => [each.id, each.open]));
    part.source = other.innerHTML;
    part.replaceChildren(...[...document.importNode(other, true).childNodes]);
    for (const each of part.querySelectorAll('details[id]')) {
      if (states.has(each.id)) each.open = states.get(each.id);
    }
  }
  document.title = fresh.title;
  if (fresh.getElementById('charts') && !document.getElementById('charts')) {
    location.reload(); // the first step: the page has curves now
    return;
  }
  const before = JSON.stringify(data.responses);
  loadData(payload);
  drawRunLegend();
  drawCharts();
  if (JSON.stringify(data.responses) !== before) fillResponseTools();
  startChartButtons();
  updateRegions();
}

async function poll() {
  try {
    const headers = version ? { 'If-None-Match': version } : {};
    const answer = await fetch(location.pathname, { headers, cache: 'no-store', signal: AbortSignal.timeout(POLL_TIMEOUT_MS) });
    if (answer.status === 200) {
      version = answer.headers.get('ETag');
      applyPage(await answer.text());
    }
    showNote(answer.status === 200 || answer.status === 304 ? noteText() : `The server answers with status ${answer.status}.`);
  } catch (error) {
    showNote('The server of this page has ended, or does not answer; the page shows what it last sent.');
  }
  setTimeout(poll, data.follow);
}

loadData(document.getElementById('data').textContent);
startCurves();
drawRunLegend();
drawCharts();
startResponses();
startChartButtons();
updateRegions();
document.addEventListener('toggle', updateRegions, true);
addEventListener('resize', updateRegions);
if (data.follow) poll();
