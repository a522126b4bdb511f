// What changes anything: the token, limits of a disk, and its removal. Each is asked back.

import { Refused, change } from "./api.js";
import { h, put, say } from "./dom.js";

// The token stays here: not in a cookie, not in any storage, and it is gone with the page.
let token = "";
const told = new EventTarget();

export function mayChange() {
  return token !== "";
}

export function onToken(listener) {
  told.addEventListener("token", listener);
  return () => told.removeEventListener("token", listener);
}

function setToken(value) {
  token = value;
  told.dispatchEvent(new Event("token"));
}

// Shows a modal dialog; `act` is awaited when it is confirmed, and its error is shown in the dialog.
function dialog({ title, body, confirm, danger, act, ready }) {
  const problem = h("p.problem", { role: "alert" });
  const yes = h(danger ? "button.danger" : "button.primary", { type: "submit" }, confirm);
  const no = h("button", { type: "button", onclick: () => box.close() }, "Cancel");
  const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), body, problem, h("div.buttons", {}, no, yes));
  const box = h("dialog", { "aria-labelledby": "dialog-title" }, form);
  const judge = () => {
    yes.disabled = ready ? !ready() : false;
  };
  form.addEventListener("input", judge);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (yes.disabled) return;
    yes.disabled = true;
    say(problem, "");
    try {
      await act();
      box.close();
    } catch (error) {
      say(problem, error.message);
      judge();
    }
  });
  // `close()` itself gives the focus back, at once. This event comes later, and the user may be elsewhere by then.
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  judge();
  box.showModal();
}

export function announce(text) {
  const place = document.getElementById("said");
  say(place, text);
  place.classList.add("shown");
  clearTimeout(place.timer);
  place.timer = setTimeout(() => place.classList.remove("shown"), 6_000);
}

export function askToken() {
  const input = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false" });
  input.value = token;
  dialog({
    title: "Token for changes",
    body: [
      h("p", {}, "Without the server's token this page only reads. The token is kept until the page is closed or loaded anew."),
      h("div.field", {}, h("label", { for: "token" }, "Token"), input),
    ],
    confirm: "Use it",
    act: async () => {
      setToken(input.value.trim());
      announce(token ? "Changes are possible now." : "This page only reads.");
    },
  });
}

async function changed(method, params) {
  try {
    return await change(method, params, token);
  } catch (error) {
    // A token that isn't taken is forgotten, so that the next attempt asks for another.
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) setToken("");
    throw error;
  }
}

export function askLimit(info, done) {
  const input = h("input", { type: "text", id: "limit", autocomplete: "off", spellcheck: "false", "aria-describedby": "limit-form" });
  input.value = info.limit ?? "";
  const before = info.limit ?? "none";
  const says = h("p");
  const tell = () => put(says, "Disk ", h("strong", {}, info.name), `: from ${before} to ${input.value.trim() || "none"}.`);
  input.addEventListener("input", tell);
  tell();
  dialog({
    title: "Change limits?",
    body: [
      h("div.field", {}, h("label", { for: "limit" }, "Limits"), input),
      h("p.quiet", { id: "limit-form" }, "Entries with commas between them, such as read-iops=1k,write-bw=50M,burst=100ms. Empty: no limit."),
      says,
    ],
    confirm: "Change",
    act: async () => {
      await changed("disk.set", { name: info.name, limit: input.value.trim() });
      announce(`Limits of ${info.name} are changed.`);
      done();
    },
  });
}

export function askRemove(info, done) {
  const name = h("input", { type: "text", id: "remove-name", autocomplete: "off", spellcheck: "false" });
  const force = h("input", { type: "checkbox", id: "force" });
  const users = info.users?.length ?? 0;
  dialog({
    title: "Remove this disk?",
    body: [
      h("p", {}, "Disk ", h("strong", {}, info.name), ` is flushed and closed. ${users ? `It is used by ${users}, who would lose it.` : "Nobody uses it now."} Its data stays on what it stands on.`),
      h("div.field", {}, h("label", { for: "remove-name" }, "Type the disk's name"), name),
      users ? h("div.field.check", {}, force, h("label", { for: "force" }, "Take it away from those who use it")) : null,
    ],
    confirm: "Remove",
    danger: true,
    ready: () => name.value === info.name,
    act: async () => {
      await changed("disk.remove", { name: info.name, force: force.checked });
      announce(`Disk ${info.name} is removed.`);
      done();
    },
  });
}
