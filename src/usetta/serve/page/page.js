// The page: an image and settings go to /v1/compare, progress and an answer come back.
import { ApiError, call, el, events, lost, setKey } from './api.js';
import { render, title, verdict } from './answer.js';
import { draw } from './figure.js';

const MAIN = ['clip', 'se', 'use'];
const VIEWS = ['adaptive', '8', '16', '32', '64'];
const EXAMPLES = {
  cat: ['tabby cat', 'tiger cat', 'Egyptian cat', 'kitten'],
  coffee: ['espresso', 'cup of tea', 'hot chocolate', 'soup bowl'],
  rocket: ['rocket', 'missile', 'space shuttle', 'crane'],
};
const STAGES = {
  waiting: () => 'Waiting for the model …',
  text: () => 'Encoding the class names …',
  views: ({ views, total }) => `Encoding views: ${views} of ${chosen('views')[0] === 'adaptive' ? 'up to ' : ''}${total}`,
  methods: () => 'Running the methods …',
};

const $ = (id) => document.getElementById(id);
let image = null; // the File
let images = 0; // how many there have been, which tells two files with one name apart
let limits = null; // of the server, once it has said them
let running = null; // the AbortController of the request in progress
let clock; // counts its seconds
let linked = { methods: [], model: '' }; // what the address asked for, until the server has said what there is
let shown = null; // what the answer on the page is for
let loadProblem = ''; // why the server could not say what it offers

// --- Settings, which the address carries after '#', so that it can be shared; never the image. ---

const chosen = (id) => [...$(id).querySelectorAll('input:checked')].map((input) => input.value);

/** Class names as people type them: one per line, or all on one line with commas between. */
function splitClasses(text) {
  const names = text.trim().split(/[\r\n]/.test(text.trim()) ? /[\r\n]+/ : ',');
  return [...new Set(names.map((name) => name.trim()).filter(Boolean))];
}

function settings() {
  return {
    classes: splitClasses($('classes').value),
    methods: [...chosen('methods'), ...chosen('other-methods')],
    views: chosen('views')[0],
    template: $('template').value.trim(),
    reject: $('reject').value,
    model: $('model').value,
  };
}

function settingsInAddress() {
  const values = new URLSearchParams(location.hash.slice(1));
  return {
    classes: values.get('classes') ?? '',
    methods: values.get('methods')?.split(',') ?? MAIN,
    views: values.get('views') ?? VIEWS[0],
    template: values.get('template') ?? '',
    reject: values.get('reject') ?? '',
    model: values.get('model') ?? '',
  };
}

function writeAddress() {
  const { classes, methods, views, template, reject, model } = settings();
  const values = new URLSearchParams();
  if (classes.length) values.set('classes', classes.join('\n'));
  if (methods.join() !== MAIN.join()) values.set('methods', methods.join());
  if (views !== VIEWS[0]) values.set('views', views);
  if (template) values.set('template', template);
  if (reject) values.set('reject', reject);
  if (model && $('model').selectedIndex > 0) values.set('model', model);
  const hash = values.toString();
  history.replaceState(null, '', hash ? `#${hash}` : location.pathname + location.search);
}

function readAddress() {
  const { classes, methods, views, template, reject, model } = settingsInAddress();
  linked = { methods, model };
  $('classes').value = classes;
  $('template').value = template;
  $('reject').value = reject;
  if (template || reject || model) $('more-settings').open = true;
  for (const input of document.querySelectorAll('#methods input, #other-methods input')) {
    input.checked = methods.includes(input.value);
  }
  if (chosen('other-methods').length) $('more-methods').open = true;
  for (const input of $('views').querySelectorAll('input')) input.checked = input.value === views;
  if (!chosen('views').length) $('views').querySelector('input').checked = true;
  if ([...$('model').options].some((option) => option.value === model)) $('model').value = model;
  updateStale();
}

function choice(type, name, value, text, hint = '') {
  return el('label', { title: hint }, el('input', { type, name, value }), ` ${text}`);
}

// --- The image ---

function report(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}

function take(file) {
  if (!file) return;
  const most = (limits?.upload ?? Infinity) - 2 ** 16; // a little is left for the other fields
  if (file.size > most) {
    const size = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MB`;
    report('image-problem', `This file has ${size(file.size)}; this server takes up to ${size(most)}.`);
    return;
  }
  report('image-problem', '');
  image = file;
  images += 1;
  URL.revokeObjectURL($('preview').src);
  $('preview').src = URL.createObjectURL(file);
  $('preview').hidden = false;
  $('image-hint').textContent = 'Another image: choose, drop or paste it here';
  updateStale();
}

// A format that the browser cannot show may still be one that the server reads.
$('preview').addEventListener('error', () => {
  $('preview').hidden = true;
  $('image-hint').textContent = `${image.name}, which the browser cannot show. Another: choose, drop or paste it here`;
});

async function takeExample(name) {
  try {
    const content = await (await call(`page/examples/${name}.jpg`)).blob();
    take(new File([content], `${name}.jpg`, { type: 'image/jpeg' }));
    $('classes').value = EXAMPLES[name].join('\n');
    changed();
  } catch (error) {
    report('image-problem', error.message);
  }
}

async function openCamera() {
  try {
    $('viewfinder').querySelector('video').srcObject =
      await navigator.mediaDevices.getUserMedia({ video: { facingMode: 'environment' } });
    $('viewfinder').showModal();
  } catch (error) {
    report('image-problem', `The browser gives no access to a camera: ${error.message}.`);
  }
}

function shoot() {
  const video = $('viewfinder').querySelector('video');
  const canvas = el('canvas', { width: video.videoWidth, height: video.videoHeight });
  canvas.getContext('2d').drawImage(video, 0, 0);
  canvas.toBlob((content) => take(new File([content], 'camera.jpg', { type: 'image/jpeg' })), 'image/jpeg', 0.95);
  $('viewfinder').close();
}

function closeCamera() {
  const video = $('viewfinder').querySelector('video');
  for (const track of video.srcObject?.getTracks() ?? []) track.stop();
  video.srcObject = null;
}

// --- The answer ---

function missing({ classes, methods }) {
  if (!image) return 'There is no image yet: drop one on the field, or take an example.';
  if (classes.length < 2) return 'Type at least two classes, so that there is something to choose from.';
  return methods.length ? '' : 'Choose at least one method.';
}

function body({ classes, methods, views, template, reject, model }) {
  const form = new FormData();
  form.append('image', image, image.name);
  form.append('classes', classes.join('\n'));
  for (const method of methods) form.append('methods', method);
  form.append('views', views);
  if (template) form.append('templates', template);
  if (reject) form.append('reject_below', reject);
  if (model) form.append('model', model);
  form.append('top', classes.length);
  form.append('show_views', 'true');
  return form;
}

const signature = (wanted) => JSON.stringify([images, wanted]);

async function classify() {
  const wanted = settings(), asked = signature(wanted), source = image;
  report('problem', missing(wanted));
  if (!$('problem').hidden) return reveal();
  running?.abort();
  const request = new AbortController();
  running = request;
  showProgress();
  try {
    const answer = await compare(wanted, request.signal);
    $('answer').replaceChildren(...render(answer), downloads(answer, wanted, source));
    const { who, label } = verdict(answer.answers);
    $('announce').textContent = `${who} ${label}`;
    shown = asked;
  } catch (error) {
    if (request.signal.aborted) return;
    report('problem', error.message);
    if (error.status === 401) askForKey();
  } finally {
    if (running === request) {
      running = null;
      clearInterval(clock);
      $('progress').hidden = true;
      updateStale();
      reveal();
    }
  }
}

async function compare(wanted, signal) {
  const headers = { Accept: 'text/event-stream' };
  const response = await call('v1/compare', { method: 'POST', body: body(wanted), headers, signal });
  for await (const { name, data } of events(response)) {
    if (name === 'answer') return data;
    if (name === 'error') throw new ApiError(data.message);
    $('stage').textContent = STAGES[data.stage](data);
    if (data.stage === 'views') $('bar').value = data.views / data.total;
  }
  throw lost();
}

function showProgress() {
  const started = performance.now();
  const tick = () => { $('seconds').textContent = `${Math.round((performance.now() - started) / 1000)} s`; };
  clearInterval(clock);
  clock = setInterval(tick, 1000);
  $('seconds').textContent = '';
  $('stage').textContent = 'Sending the image …';
  $('bar').removeAttribute('value');
  $('progress').hidden = false;
  updateStale();
  reveal();
}

/** An answer is dimmed as soon as it is not about what the form says. */
function updateStale() {
  const stale = shown !== null && (running !== null || shown !== signature(settings()));
  $('answer').classList.toggle('stale', stale);
  $('stale').hidden = !stale || running !== null;
}

/** The answer may be above the button on a wide screen, and is below it on a narrow one. */
function reveal() {
  const top = $('result').getBoundingClientRect().top;
  if (top < 0 || top > window.innerHeight * 0.6) {
    const calm = matchMedia('(prefers-reduced-motion: reduce)').matches;
    $('result').scrollIntoView({ behavior: calm ? 'auto' : 'smooth' });
  }
}

function downloads(answer, wanted, source) {
  const save = (name, content) => {
    const address = URL.createObjectURL(content);
    el('a', { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
  };
  const numbers = () => {
    const views = answer.views.map(({ image: _pixels, ...view }) => view);
    const text = JSON.stringify({ settings: wanted, answers: answer.answers, views }, null, 1);
    save('usetta.json', new Blob([text], { type: 'application/json' }));
  };
  return el('section', { aria: { label: 'Download' } },
    el('h2', {}, 'Download'),
    el('p', { className: 'files' },
      el('button', { type: 'button', id: 'save-json', onclick: numbers }, 'Numbers (JSON)'),
      el('button', { type: 'button', id: 'save-png', onclick: async () => save('usetta.png', await draw(answer, source)) },
        'Image (PNG)')),
    el('p', { className: 'hint' }, 'Answered by the model ', el('bdi', {}, answer.answers[0].model), '.'));
}

// --- What the server offers ---

function askForKey() {
  $('key-field').hidden = false;
  $('key').focus();
}

async function loadMethods() {
  const { methods } = await (await call('v1/methods')).json();
  const others = methods.filter(({ name }) => !MAIN.includes(name));
  const wanted = $('other-methods').hasChildNodes() ? chosen('other-methods') : linked.methods;
  $('other-methods').replaceChildren(...others.map(({ name, description }) => {
    const label = choice('checkbox', 'methods', name, title(name), description);
    label.querySelector('input').checked = wanted.includes(name);
    return label;
  }));
  for (const input of $('methods').querySelectorAll('input')) {
    input.parentElement.title = methods.find(({ name }) => name === input.value)?.description ?? '';
  }
  if (chosen('other-methods').length) $('more-methods').open = true;
}

async function loadModels() {
  const known = await (await call('v1/models')).json();
  limits = known.limits;
  const wanted = $('model').value || linked.model;
  $('model').replaceChildren(...known.models.map(({ name }) => el('option', { value: name }, name)));
  $('model-choice').hidden = known.models.length < 2;
  $('most-views').textContent = Math.min(64, limits.views);
  for (const input of $('views').querySelectorAll('input')) input.parentElement.hidden = Number(input.value) > limits.views;
  if (known.models.some(({ name }) => name === wanted)) $('model').value = wanted;
}

async function load() {
  try {
    await loadMethods();
    await loadModels();
    // A problem of the form, reported meanwhile, stays.
    if ($('problem').textContent === loadProblem) report('problem', '');
    writeAddress();
  } catch (error) {
    loadProblem = error.message;
    report('problem', loadProblem);
    if (error.status === 401) askForKey();
    else if (error.status === 503) setTimeout(load, 2000); // the model is being loaded
  }
  updateStale();
}

function changed() {
  writeAddress();
  updateStale();
}

async function copyLink() {
  writeAddress();
  try {
    await navigator.clipboard.writeText(location.href);
    $('copied').textContent = 'Copied.';
  } catch {
    $('copied').textContent = 'The browser does not allow it: copy the address of this page instead.';
  }
}

$('methods').append(...MAIN.map((name) => choice('checkbox', 'methods', name, title(name))));
$('views').append(...VIEWS.map((value) => choice('radio', 'views', value, value)));
readAddress();
load();

$('settings').addEventListener('submit', (event) => { event.preventDefault(); classify(); });
$('settings').addEventListener('input', changed);
$('image-file').addEventListener('change', (event) => take(event.target.files[0]));
for (const name of Object.keys(EXAMPLES)) $(`example-${name}`).addEventListener('click', () => takeExample(name));
$('camera').hidden = !navigator.mediaDevices?.getUserMedia; // browsers have it for https and for this machine only
$('camera').addEventListener('click', openCamera);
$('shoot').addEventListener('click', shoot);
$('leave-camera').addEventListener('click', () => $('viewfinder').close());
$('viewfinder').addEventListener('close', closeCamera);
$('cancel').addEventListener('click', () => { running?.abort(); });
$('copy-link').addEventListener('click', copyLink);
$('key').addEventListener('change', () => { setKey($('key').value); load(); });
window.addEventListener('hashchange', readAddress);
document.addEventListener('dragover', (event) => { event.preventDefault(); $('image').classList.add('over'); });
document.addEventListener('dragleave', () => $('image').classList.remove('over'));
document.addEventListener('drop', (event) => {
  event.preventDefault();
  $('image').classList.remove('over');
  take(event.dataTransfer.files[0]);
});
document.addEventListener('paste', (event) => {
  take([...(event.clipboardData?.files ?? [])].find((file) => file.type.startsWith('image/')));
});
