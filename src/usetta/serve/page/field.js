// The image field. The file is read in the browser and travels in the request as a data URL that carries its name, so
// the server never writes it to disk. `element`, `props` and `trigger` come from Gradio, which renders the field anew
// when `props.value` changes; so listeners are on `element`, which stays.
const report = (text) => { element.querySelector('.problem').textContent = text; };

const take = (file) => {
  if (!file) return;
  if (file.size > MOST_BYTES) {
    report(`This file has ${(file.size / 2**20).toFixed(1)} MB; this server takes up to ${(MOST_BYTES / 2**20).toFixed(1)} MB.`);
    return;
  }
  const reader = new FileReader();
  reader.onerror = () => report('The browser cannot read this file.');
  reader.onload = () => {
    const [head, content] = String(reader.result).split(',', 2);
    const kind = head.slice(5).split(';')[0] || 'application/octet-stream';
    props.value = `data:${kind};name=${encodeURIComponent(file.name).replaceAll("'", '%27')};base64,${content || ''}`;
    trigger('change');
  };
  reader.readAsDataURL(file);
};

element.addEventListener('change', (event) => { if (event.target.type === 'file') take(event.target.files[0]); });
element.addEventListener('dragover', (event) => { event.preventDefault(); element.classList.add('over'); });
element.addEventListener('dragleave', () => element.classList.remove('over'));
element.addEventListener('drop', (event) => {
  event.preventDefault();
  element.classList.remove('over');
  take(event.dataTransfer.files[0]);
});
document.addEventListener('paste', (event) => {
  const file = event.clipboardData?.files[0];
  if (file && file.type.startsWith('image/')) take(file);
});
// A format that the browser cannot show may still be one that the server reads.
element.addEventListener('error', (event) => { if (event.target.tagName === 'IMG') event.target.remove(); }, true);
