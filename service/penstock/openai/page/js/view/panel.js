// Opens and closes the settings. Where there is room they stand beside the conversation; on a narrow window they
// lie above it, and keep the focus until they are closed.

const WIDE = matchMedia("(min-width: 68rem)");
const KEPT = "penstock.panel";

export class Panel {
  constructor({ panel, opener, closer }) {
    this.panel = panel;
    this.opener = opener;
    opener.addEventListener("click", () => (panel.open ? this.close() : this.open()));
    closer.addEventListener("click", () => this.close());
    panel.addEventListener("close", () => this.told());
    // A click beside a panel that lies above the page is a click on its backdrop, which counts as the panel itself.
    panel.addEventListener("click", (event) => {
      if (event.target === panel && !WIDE.matches) this.close();
    });
    WIDE.addEventListener("change", () => {
      panel.close();
      if (WIDE.matches && this.wanted()) this.open({ focus: false });
    });
    if (WIDE.matches && this.wanted()) this.open({ focus: false });
    this.told();
  }

  open({ focus = true } = {}) {
    if (!this.panel.open) {
      if (WIDE.matches) this.panel.setAttribute("open", "");
      else this.panel.showModal();
    }
    // A panel that lies above the page focuses its first button by itself, which opens no keyboard on a telephone.
    if (focus && WIDE.matches) {
      this.panel.querySelector("textarea").focus();
      this.want("open");
    }
    this.told();
  }

  close() {
    const wide = WIDE.matches;
    this.panel.close();
    if (wide) this.want("closed");
    this.opener.focus();
  }

  /** Opens the settings at one field, with what it is part of. */
  show(field) {
    this.open({ focus: false });
    field.closest("details")?.setAttribute("open", "");
    field.scrollIntoView({ block: "center" });
    field.focus();
  }

  told() {
    this.opener.setAttribute("aria-expanded", String(this.panel.open));
    document.body.classList.toggle("with-panel", this.panel.open && WIDE.matches);
  }

  wanted() {
    try {
      return localStorage.getItem(KEPT) === "open";
    } catch {
      return false;
    }
  }

  want(state) {
    try {
      localStorage.setItem(KEPT, state);
    } catch {
      // Then they are closed again at the next visit.
    }
  }
}
