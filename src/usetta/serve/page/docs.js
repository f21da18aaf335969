// The API as a page for people, made from the OpenAPI document of this very server.
import { call, el, setKey } from './api.js';

const FORM = 'multipart/form-data', JSON_TYPE = 'application/json';
const $ = (id) => document.getElementById(id);
const base = new URL('.', location.href).href.replace(/\/$/, '');
let schemas = {};

/** A schema itself, where there is only a reference to it. */
const resolved = (schema) => (schema.$ref ? schemas[schema.$ref.split('/').pop()] : schema);

/** A description whose `words` are code. */
function prose(text) {
  return text.split('`').map((part, i) => (i % 2 ? el('code', {}, part) : part));
}

/** What a value may be, in a few words. */
function kind(schema) {
  if (schema.anyOf) return schema.anyOf.map(kind).join(' or ');
  if ('const' in schema) return JSON.stringify(schema.const);
  if (schema.$ref) return schema.$ref.split('/').pop();
  const { minimum, maximum, maxLength, maxItems, prefixItems } = schema;
  if (prefixItems) return `${prefixItems.length} ${prefixItems[0].type}s`;
  if (schema.type === 'array') {
    const items = kind(schema.items).replace(/^[a-z]+/, '$&s');
    return `${maxItems ? `up to ${maxItems}` : 'list of'} ${items}`;
  }
  if (schema.format === 'binary') return 'file';
  let text = schema.type ?? 'anything';
  if (schema.contentEncoding) text += ` in ${schema.contentEncoding}`;
  if (minimum !== undefined && maximum !== undefined && maximum < 1e15) text += ` from ${minimum} to ${maximum}`;
  else if (minimum !== undefined) text += ` from ${minimum}`;
  return maxLength ? `${text} of up to ${maxLength} characters` : text;
}

function table(heads, rows) {
  return el('div', { className: 'scroll' }, el('table', {},
    el('thead', {}, el('tr', {}, ...heads.map((text) => el('th', { scope: 'col' }, text)))),
    el('tbody', {}, ...rows.map(([first, ...cells]) =>
      el('tr', {}, el('th', { scope: 'row' }, ...first), ...cells.map((cell) => el('td', {}, ...cell)))))));
}

/** The fields of an object, with those of the objects inside it below. */
function fieldRows(schema, prefix = '') {
  return Object.entries(resolved(schema).properties ?? {}).flatMap(([name, field]) => {
    const inner = resolved(field.items ?? field);
    const below = inner.properties ? fieldRows(inner, `${prefix}${name}${field.items ? '[]' : ''}.`) : [];
    return [[[el('code', {}, prefix + name)], [kind(field)], prose(field.description ?? inner.description ?? '')], ...below];
  });
}

function requestFields(content) {
  const schema = content[FORM].schema;
  const order = ([a], [b]) => schema.required.includes(b) - schema.required.includes(a);
  const rows = Object.entries(schema.properties).sort(order).map(([name, field]) => {
    const required = schema.required.includes(name);
    const fallback = required ? 'required' : field.default == null ? '' : el('code', {}, JSON.stringify(field.default));
    const note = field.format === 'binary' || field.items?.format === 'binary'
      ? 'An image file; in JSON its content in base64.' : field.description ?? '';
    // Null is what a field is that was not sent, so there is no need to say it.
    return [[el('code', {}, name)], [kind(field).replace(/ or null$/, '')], [fallback], prose(note)];
  });
  return table(['field', 'value', 'default', ''], rows);
}

function curl(path, verb, content, needsKey) {
  const key = needsKey ? " -H 'Authorization: Bearer KEY'" : '';
  if (!content) {
    const order = verb === 'get' ? '' : ` -X ${verb.toUpperCase()}`;
    return [`curl${order}${key} ${base}${path.replace('{session}', 'NAME')}`];
  }
  const fields = content[FORM].schema.properties;
  const image = fields.images ? '-F images=@cat.png -F images=@fox.png' : '-F image=@cat.png';
  const method = fields.methods ? '-F methods=clip -F methods=use' : '-F method=use';
  const command = `curl${key} ${image} -F classes='tabby cat' -F classes='red fox' ${method}`;
  const lines = [`${command} ${base}${path}`];
  if (fields.show_views) lines.push(`${command.replace('curl', "curl -N -H 'Accept: text/event-stream'")} ${base}${path}`);
  return lines;
}

const pretty = (value) => el('pre', {}, JSON.stringify(value, null, 2));
const folded = (summary, ...children) => el('details', {}, el('summary', {}, summary), ...children);

function operation(path, verb, about, secured) {
  const content = about.requestBody?.content, parts = [];
  if (about.description) parts.push(el('p', {}, ...prose(about.description)));
  const needsKey = secured && about.security?.length !== 0;
  parts.push(el('h3', {}, 'Example'), el('pre', {}, curl(path, verb, content, needsKey).join('\n')));
  if (content) {
    const [example] = Object.values(content[JSON_TYPE].examples);
    parts.push(el('h3', {}, `Fields of a form (${FORM}) or of ${JSON_TYPE}`), requestFields(content));
    parts.push(folded('A request in JSON', pretty(example.value)));
  }
  const answer = about.responses['200'].content?.[JSON_TYPE]?.schema;
  if (answer?.$ref) {
    const { examples } = resolved(answer);
    parts.push(el('h3', {}, 'Answer'), table(['field', 'value', ''], fieldRows(answer)));
    if (examples) parts.push(folded('An answer', pretty(examples[0])));
  }
  const errors = Object.entries(about.responses).filter(([status]) => status !== '200');
  if (errors.length) {
    parts.push(folded('Errors', el('p', {}, 'The body is ', el('code', {}, '{"error": {"code", "message", "field"}}'), '.'),
      table(['status', ''], errors.map(([status, { description }]) => [[status], [description]]))));
  }
  return el('section', { className: 'operation', id: anchor(path) },
    el('h2', {}, el('span', { className: `verb ${verb}` }, verb.toUpperCase()), el('code', {}, path)),
    el('p', {}, ...prose(about.summary)), ...parts);
}

const anchor = (path) => path.slice(1).replaceAll('/', '-');

async function load() {
  try {
    const about = await (await call('openapi.json')).json();
    schemas = about.components.schemas;
    const operations = Object.entries(about.paths).flatMap(([path, verbs]) =>
      Object.entries(verbs).map(([verb, one]) => [path, verb, one]));
    $('contents').replaceChildren(...operations.map(([path]) => el('a', { href: `#${anchor(path)}` }, el('code', {}, path))));
    $('operations').replaceChildren(...operations.map((one) => operation(...one, Boolean(about.security))));
    $('problem').hidden = $('key-form').hidden = true;
    document.getElementById(location.hash.slice(1))?.scrollIntoView();
  } catch (error) {
    $('key-form').hidden = error.status !== 401;
    $('problem').textContent = error.message;
    $('problem').hidden = false;
  }
}

$('key-form').addEventListener('submit', (event) => { event.preventDefault(); setKey($('key').value); load(); });
load();
