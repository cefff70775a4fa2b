/* Browsers start no worker from a file. Where the site is opened from disk, the script of the search runs in a frame. */
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.answer(structuredClone(data));
      this.loaded = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.onload = () => resolve(inside);
        script.onerror = (event) => this.onerror && this.onerror(event);
        script.src = new URL(address, document.baseURI).href;
        inside.document.body.append(script);
      });
    }

    answer(data) {
      setTimeout(() => this.onmessage && this.onmessage({ data }));
    }

    /* As for a worker, messages are copies: the script changes what it is given. */
    postMessage(message) {
      const data = structuredClone(message);
      this.loaded.then((inside) => inside.onmessage({ data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
