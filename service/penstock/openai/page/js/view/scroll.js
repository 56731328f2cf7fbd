// Keeps the newest text in view, unless the reader has scrolled away from it.

const NEAR = 48; // pixels from the end that still count as the end

export class Follower {
  constructor(scroller, button) {
    this.scroller = scroller;
    this.button = button;
    this.following = true;
    scroller.addEventListener("scroll", () => {
      this.following = this.distance() < NEAR;
      this.button.hidden = this.following;
    }, { passive: true });
    button.addEventListener("click", () => this.toEnd());
  }

  distance() {
    return this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight;
  }

  /** Called after something was added. */
  added() {
    if (this.following) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.button.hidden = this.following || this.distance() < NEAR;
  }

  toEnd() {
    this.following = true;
    this.added();
  }
}
