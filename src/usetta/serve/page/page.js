// What the page does in the browser beside Gradio.
window.usetta = {
  started: 0,

  // Shown instead of the answer while it is computed.
  waiting(views) {
    this.started = performance.now();
    const pace = Number(document.querySelector('#answer [data-pace]')?.dataset.pace || 0);
    // For adaptive views nobody knows beforehand how long it takes.
    const count = Number(views);
    const expected = pace && count ? ` That usually takes about ${Math.max(1, Math.round(pace * count))} s.` : '';
    clearInterval(this.clock);
    this.clock = setInterval(() => {
      const clock = document.querySelector('#answer .seconds');
      if (clock) clock.textContent = `${Math.round((performance.now() - this.started) / 1000)} s`;
      else clearInterval(this.clock);
    }, 1000);
    setTimeout(() => this.reveal(), 50);
    return `<div class="waiting" role="status"><p>Encoding ${count ? `${count} ` : ''}views of the image …${expected}
      <span class="seconds" aria-hidden="true"></span></p><div class="runner"><i></i></div></div>`;
  },

  // The answer may be above the button on a wide screen, and is below it on a narrow one.
  reveal() {
    const answer = document.getElementById('answer');
    const top = answer.getBoundingClientRect().top;
    if (top < 0 || top > window.innerHeight * 0.6) {
      const calm = matchMedia('(prefers-reduced-motion: reduce)').matches;
      answer.scrollIntoView({ behavior: calm ? 'auto' : 'smooth' });
    }
  },

  lost() {
    return `<div class="problem" role="alert"><p>There was no answer: the server cannot be reached, or it failed. Try
      again, and if that does not help, its log says why.</p></div>`;
  },

  async example(name) {
    const response = await fetch(`examples/${name}.jpg`);
    const blob = await response.blob();
    return new Promise((done) => {
      const reader = new FileReader();
      reader.onload = () => done(String(reader.result).replace(';base64', `;name=${name}.jpg;base64`));
      reader.readAsDataURL(blob);
    });
  },
};
