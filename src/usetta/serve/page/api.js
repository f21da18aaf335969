// Requests to the API of this server. A key, if the server asks for one, is kept in memory only.
let key = '';

/** Use this key from now on. */
export function setKey(text) {
  // A header holds bytes: those of the key in UTF-8, one character each.
  key = String.fromCharCode(...new TextEncoder().encode(text.trim()));
}

/** What the server, or the browser on its behalf, says is wrong; `status` is 0 where there was no answer. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(sentence(message));
    this.status = status;
  }
}

/** The response to a request; an ApiError unless it is a good one. */
export async function call(path, { headers = {}, ...options } = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: key ? { ...headers, 'X-API-Key': key } : headers });
  } catch (error) {
    throw error.name === 'AbortError' ? error : lost();
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `the server answered with status ${response.status}`, response.status);
}

/** The server-sent events of a response, as `{name, data}`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === 'AbortError' ? error : lost();
    }
    if (part.done) return;
    text += part.value;
    const complete = text.split('\n\n');
    text = complete.pop();
    for (const event of complete) {
      const [, name, data] = event.match(/^event: (\w+)\ndata: (.*)$/);
      yield { name, data: JSON.parse(data) };
    }
  }
}

/** What to say when there is no answer at all. */
export function lost() {
  return new ApiError('There was no answer: the server cannot be reached, or it failed. Try again, and if that does not ' +
    'help, its log says why.');
}

/** An element with properties and children; text is always text, never HTML. */
export function el(tag, properties = {}, ...children) {
  const { style = {}, aria = {}, role, ...others } = properties;
  const element = Object.assign(document.createElement(tag), others);
  for (const [name, value] of Object.entries(style)) element.style.setProperty(name, value);
  for (const [name, value] of Object.entries(aria)) element.setAttribute(`aria-${name}`, value);
  if (role) element.setAttribute('role', role);
  element.append(...children);
  return element;
}

function sentence(message) {
  const text = message.charAt(0).toUpperCase() + message.slice(1);
  return /[.?!]$/.test(text) ? text : `${text}.`;
}
