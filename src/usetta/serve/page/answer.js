// An answer of /v1/compare as elements: probabilities side by side, what each method did, and the views by confidence.
import { el } from './api.js';

// Okabe and Ito's colours, which people with any kind of colour vision can distinguish; grey is zero-shot's.
const COLOURS = ['#8a8f98', '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#7a5195'];
const TITLES = { clip: 'Zero-shot', se: 'SE', use: 'USE' };
const SHOWN_CLASSES = 6;

/** A method as people call it. */
export function title(method) {
  const [name, ...settings] = method.split(':');
  return [TITLES[name] ?? name.toUpperCase(), ...settings].join(':');
}

export const colour = (number) => COLOURS[number % COLOURS.length];

export function percent(p) {
  if (p > 0 && p < 0.0005) return '<0.1 %';
  const digits = (p > 0 && p < 0.1) || (p > 0.9 && p < 0.9995) ? 1 : 0;
  return `${(100 * p).toFixed(digits)} %`;
}

/** What an answer says: its class, unless it was rejected. */
export const said = (answer) => (answer.rejected ? 'none of these' : answer.label);

/** The answer in a few words: who says what, and the class. */
export function verdict(answers) {
  const last = answers[answers.length - 1];
  const all = answers.length > 1 && answers.every((answer) => said(answer) === said(last));
  return { who: all ? 'All say' : `${title(last.method)} says`, label: said(last) };
}

/** The classes that any method finds likely, as `{label, probabilities}`, one probability for each method. */
export function likelyClasses(answers) {
  const byMethod = answers.map((answer) => new Map(answer.ranked.map((row) => [row.label, row.probability])));
  return [...byMethod[0].keys()]
    .map((label) => ({ label, probabilities: byMethod.map((known) => known.get(label)) }))
    .sort((a, b) => Math.max(...b.probabilities) - Math.max(...a.probabilities))
    .slice(0, SHOWN_CLASSES);
}

/** The views with their `number` and the numbers of the answers that chose them: the image, then the most confident. */
export function rankedViews({ answers, views }) {
  const marks = answers.map(chosenViews);
  const [image, ...crops] = views.map((view, number) => ({
    ...view,
    number,
    marks: [...answers.keys()].filter((i) => number > 0 && marks[i].has(number)),
  }));
  return [image, ...crops.sort((a, b) => a.entropy - b.entropy)];
}

/** The crops that count in an answer, or that it was tuned on where every view or none counts. */
function chosenViews({ why }) {
  const counting = why.weights.flatMap((weight, view) => (view > 0 && weight > 0 ? [view] : []));
  return new Set(why.beta === null || !counting.length ? why.tuned_on : counting);
}

/** The sections of an answer. */
export function render(answer) {
  const { answers } = answer;
  return [
    cards(answers),
    bars(answers),
    ...scales(answers),
    ...answers.flatMap((one, i) => (one.why.skipped === null ? [] : [tuning(one, colour(i))])),
    viewList(answer),
  ];
}

// Names that people typed go in their own direction of writing.
const name = (text) => el('bdi', {}, text);
const section = (label, ...children) => el('section', { aria: { label } }, ...children);

function cards(answers) {
  const { who, label } = verdict(answers);
  const each = answers.map((answer, i) =>
    el('div', { className: 'card', style: { '--method': colour(i) } },
      el('h3', {}, title(answer.method)),
      el('p', { className: 'label' }, ...(answer.rejected ? ['None of these; closest: '] : []), name(answer.label), ' ',
        el('b', {}, percent(answer.probability))),
      el('p', { className: 'reason' }, name(answer.why.reason))));
  return section('Answers', el('h2', {}, `${who} `, name(label)), el('div', { className: 'cards' }, ...each));
}

function bars(answers) {
  const rows = likelyClasses(answers).flatMap(({ label, probabilities }) => [
    el('dt', {}, name(label)),
    el('dd', {}, ...probabilities.map((p, i) =>
      el('div', { className: 'bar', style: { '--method': colour(i) } },
        el('span', { className: 'who' }, title(answers[i].method)),
        el('span', { className: 'track' }, el('i', { style: { width: `${(100 * p).toFixed(1)}%` } })),
        el('span', { className: 'much' }, percent(p))))),
  ]);
  return section('Probabilities', el('h2', {}, 'How probable each class is'), el('dl', { className: 'bars' }, ...rows));
}

/** The weight of the whole image on its scale, once for methods that give it the same. */
function scales(answers) {
  const groups = new Map();
  for (const answer of answers.filter(({ beta_range: range }) => range)) {
    const equal = JSON.stringify([answer.why.beta, answer.why.delta, answer.beta_range]);
    groups.set(equal, [...(groups.get(equal) ?? []), answer]);
  }
  return [...groups.values()].map((group) => {
    const { why: { beta, delta }, beta_range: [least, most] } = group[0];
    const place = most > least ? Math.min(1, Math.max(0, (beta - least) / (most - least))) : 0.5;
    const ends = [[least, 'crops count more'], [0.5, 'equal'], [most, 'image counts more']];
    const who = group.map((answer) => title(answer.method)).join(' and ');
    return section('Weight of the image',
      el('h2', {}, `How much the whole image counts in ${who}`),
      el('p', {}, `It is more confident than ${percent(delta)} of its crops, so its weight is `,
        el('b', {}, `β = ${beta.toFixed(2)}`),
        `. Its most confident crops share the other ${(1 - beta).toFixed(2)}.`),
      el('div', { className: 'scale', role: 'img',
        aria: { label: `β is ${beta.toFixed(2)} on a scale from ${least} to ${most}` } },
        el('div', { className: 'line' },
          el('i', { style: { left: `${(100 * place).toFixed(1)}%` } }, el('b', {}, beta.toFixed(2)))),
        el('div', { className: 'ends' }, ...ends.map(([at, text]) => el('span', {}, String(at), el('br'), text)))));
  });
}

function tuning(answer, ownColour) {
  const content = answer.why.skipped
    ? [el('p', {}, el('b', {}, 'Skipped: the views already agree.'),
        ' The image and its most confident crops choose the same class, so there was nothing to tune.')]
    : [el('p', {}, 'The views did not agree, so the method adapted to this image:'), changes(answer)];
  return el('section', { className: 'tuning', style: { '--method': ownColour }, aria: { label: 'Tuning' } },
    el('h2', {}, `What ${title(answer.method)} changed`), ...content);
}

/** The likeliest three classes before and after tuning. */
function changes(answer) {
  const before = new Map(answer.before_tuning.map((row) => [row.label, row.probability]));
  const rows = answer.ranked
    .map(({ label, probability }) => ({ label, before: before.get(label), after: probability }))
    .sort((a, b) => Math.max(b.before, b.after) - Math.max(a.before, a.after))
    .slice(0, 3)
    .map((row) => el('tr', {}, el('th', { scope: 'row' }, name(row.label)), el('td', {}, percent(row.before)),
      el('td', {}, `${percent(row.after)} ${row.after > row.before ? '▲' : '▼'}`)));
  const heads = ['class', 'before tuning', 'after tuning'].map((text) => el('th', { scope: 'col' }, text));
  return el('table', { className: 'changes' }, el('thead', {}, el('tr', {}, ...heads)), el('tbody', {}, ...rows));
}

function viewList(answer) {
  const { answers, views } = answer, several = views.length > 1;
  const heading = several
    ? `The image and its ${views.length - 1} crops, most confident crop first` : 'The image as the model sees it';
  const guess = Math.log(answers[0].ranked.length).toFixed(2);
  const items = rankedViews(answer).map((view) => {
    const badges = view.marks.map((i) =>
      el('span', { className: 'badge', style: { '--method': colour(i) } }, `✓ ${title(answers[i].method)}`));
    if (view.number === 0) badges.unshift(el('span', { className: 'badge' }, 'whole image'));
    return el('li', { className: view.number === 0 ? 'weak' : badges.length ? 'marked' : 'other' },
      el('img', { src: view.image, alt: '', width: 160, height: 160 }),
      el('span', { className: 'badges' }, ...badges),
      el('span', { className: 'own' }, name(view.label)),
      el('span', { className: 'entropy' }, `entropy ${view.entropy.toFixed(2)}`));
  });
  return section('Views', el('h2', {}, heading),
    el('p', { className: 'hint' }, 'Under each: the class that it would choose by itself, and its entropy, which is how ' +
      `much the model doubts: 0 is confident, ${guess} is a plain guess.` +
      (several ? ' A badge marks what a method chose: these crops count in its answer, or it was tuned on them.' : '')),
    el('ol', { className: 'views' }, ...items));
}
