// The answer as one image, for a slide or a message: the image, the probabilities by method, and the views.
import { colour, likelyClasses, percent, rankedViews, title, verdict } from './answer.js';

const WIDTH = 1200, MARGIN = 32, LEFT = 340, SHOWN_VIEWS = 24, COLUMNS = 8;
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif';
const INK = '#1f2937', SUBDUED = '#475569', TRACK = '#e2e8f0';

/** A PNG of an answer about `file`. */
export async function draw(answer, file) {
  const { answers } = answer;
  const views = rankedViews(answer).slice(0, SHOWN_VIEWS);
  const thumbnails = await Promise.all(views.map((view) => loaded(view.image)));
  const original = await createImageBitmap(file).catch(() => thumbnails[0]); // a format that the browser cannot show
  const rows = likelyClasses(answers);
  const rowHeight = 26 + 20 * answers.length;
  const tile = (WIDTH - 2 * MARGIN + 10) / COLUMNS - 10;
  const scale = Math.min(LEFT / original.width, 320 / original.height);
  const viewsTop = 90 + Math.max(rows.length * rowHeight, original.height * scale + 30 * answers.length) + 50;
  const height = viewsTop + Math.ceil(views.length / COLUMNS) * (tile + 46) + MARGIN;
  const canvas = Object.assign(document.createElement('canvas'), { width: 2 * WIDTH, height: Math.ceil(2 * height) });
  const page = canvas.getContext('2d');
  page.scale(2, 2);
  page.fillStyle = '#fff';
  page.fillRect(0, 0, WIDTH, height);

  const { who, label } = verdict(answers);
  text(page, `${who} ${label}`, MARGIN, 54, { font: `600 28px ${FONT}`, width: WIDTH - 2 * MARGIN });
  page.drawImage(original, MARGIN, 90, original.width * scale, original.height * scale);
  answers.forEach((one, i) => {
    const y = 90 + original.height * scale + 30 * (i + 1);
    block(page, MARGIN, y - 12, 14, 14, colour(i));
    text(page, `${title(one.method)}: ${one.rejected ? 'none of these, closest: ' : ''}${one.label} ${percent(one.probability)}`, MARGIN + 22, y, { width: LEFT - 22 });
  });

  const x = MARGIN + LEFT + 36, barLeft = x + 90, barWidth = WIDTH - MARGIN - 70 - barLeft;
  rows.forEach((row, i) => {
    const top = 90 + i * rowHeight;
    text(page, row.label, x, top + 14, { font: `600 15px ${FONT}`, width: WIDTH - MARGIN - x });
    row.probabilities.forEach((p, k) => {
      const y = top + 22 + 20 * k;
      text(page, title(answers[k].method), x, y + 12, { font: `13px ${FONT}`, width: 84 });
      block(page, barLeft, y, barWidth, 13, TRACK);
      block(page, barLeft, y, Math.max(1, barWidth * p), 13, colour(k));
      text(page, percent(p), WIDTH - MARGIN, y + 12, { font: `13px ${FONT}`, align: 'right' });
    });
  });

  const rest = answer.views.length - views.length;
  text(page, 'The image and its crops, most confident crop first' + (rest ? `; ${rest} more are not shown` : ''), MARGIN,
    viewsTop - 16, { font: `600 15px ${FONT}` });
  views.forEach((view, i) => {
    const left = MARGIN + (i % COLUMNS) * (tile + 10), top = viewsTop + Math.floor(i / COLUMNS) * (tile + 46);
    if (view.number === 0 || view.marks.length) {
      block(page, left - 3, top - 3, tile + 6, tile + 6, view.number === 0 ? '#0072B2' : '#009E73');
    }
    page.drawImage(thumbnails[i], left, top, tile, tile);
    text(page, view.label, left, top + tile + 16, { font: `13px ${FONT}`, width: tile });
    text(page, `entropy ${view.entropy.toFixed(2)}`, left, top + tile + 32, { font: `12px ${FONT}`, fill: SUBDUED });
  });
  return new Promise((done) => { canvas.toBlob(done, 'image/png'); });
}

async function loaded(address) {
  const thumbnail = Object.assign(new Image(), { src: address });
  await thumbnail.decode();
  return thumbnail;
}

function block(page, x, y, width, height, fill) {
  page.fillStyle = fill;
  page.fillRect(x, y, width, height);
}

/** One line of text, cut off with an ellipsis where it is wider than `width`. */
function text(page, line, x, y, { font = `15px ${FONT}`, fill = INK, width = Infinity, align = 'left' } = {}) {
  Object.assign(page, { font, fillStyle: fill, textAlign: align });
  let end = line.length, shown = line;
  while (end > 0 && page.measureText(shown).width > width) shown = `${line.slice(0, --end)}…`;
  page.fillText(shown, x, y);
}
