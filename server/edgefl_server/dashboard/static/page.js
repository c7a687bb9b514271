"use strict";
// Keeps a page new: takes what the server sends and puts it where it belongs. The server makes all markup, and escapes
// whatever devices said; here only what differs is put in, so that the keyboard's focus and a selection stay.
(() => {
  const live = document.body.dataset.live;
  const byId = (id) => document.getElementById(id);
  const path = location.pathname.split("/").map(decodeURIComponent);
  let source = null;

  function query() {
    if (live === "device") return new URLSearchParams({device: path[2]});
    if (live === "round") return new URLSearchParams({round: path[2]});
    return new URLSearchParams(location.search);
  }

  function elementOf(html, parent) {
    const template = document.createElement(parent === "TBODY" ? "tbody" : "ol");
    template.innerHTML = html;
    return template.firstElementChild;
  }

  function put(element, html) {
    if (element.innerHTML !== html) element.innerHTML = html;
  }

  // A row is changed cell by cell.
  function patch(old, fresh) {
    old.className = fresh.className;
    if (old.children.length !== fresh.children.length || old.tagName !== "TR") {
      put(old, fresh.innerHTML);
      return;
    }
    for (let at = 0; at < fresh.children.length; at++) put(old.children[at], fresh.children[at].innerHTML);
  }

  function arrange(body, rows, order) {
    const known = new Map();
    for (const row of body.children) known.set(row.dataset.key, row);
    for (const [key, html] of Object.entries(rows || {})) {
      const fresh = elementOf(html, body.tagName);
      const old = known.get(key);
      if (old) patch(old, fresh);
      else known.set(key, fresh);
    }
    if (!order) return;
    const wanted = new Set(order);
    for (const [key, row] of known) if (!wanted.has(key)) row.remove();
    let next = body.firstElementChild;
    for (const key of order) {
      const row = known.get(key);
      if (!row) continue;
      if (row === next) next = next.nextElementSibling;
      else body.insertBefore(row, next);
    }
  }

  function take(news) {
    for (const [id, html] of Object.entries(news.html || {})) {
      const element = byId(id);
      if (element) put(element, html);
    }
    const tables = new Set([...Object.keys(news.rows || {}), ...Object.keys(news.order || {})]);
    for (const id of tables) {
      const body = byId(id);
      if (body) arrange(body, (news.rows || {})[id], (news.order || {})[id]);
    }
    if (news.charts && window.edgeflCharts) window.edgeflCharts(news.charts);
    document.body.dataset.news = Number(document.body.dataset.news || 0) + 1;
  }

  function listen() {
    if (source) source.close();
    source = new EventSource("/live?" + query());
    source.onmessage = (event) => {
      put(byId("link"), "");
      take(JSON.parse(event.data));
    };
    source.onerror = () => {
      put(byId("link"), "No updates: the dashboard's process is away, or has too many readers. This page tries again.");
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, 10000);  // an answer that a browser takes for final
    };
  }

  function filter(form) {
    const asked = new URLSearchParams();
    for (const [name, value] of new FormData(form)) if (value) asked.set(name, value);
    history.replaceState(null, "", "/?" + asked + "#fleet");
    listen();
  }

  const form = byId("filter");
  if (form) {
    let soon = 0;
    form.addEventListener("input", () => {
      clearTimeout(soon);
      soon = setTimeout(() => filter(form), 200);
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      filter(form);
    });
  }

  const operator = byId("operator");
  if (operator) {
    operator.addEventListener("submit", (event) => event.preventDefault());
    operator.addEventListener("click", async (event) => {
      const order = event.target.dataset.order;
      if (!order) return;
      const asked = order === "rollback" ? {order, version: Number(operator.elements.version.value)} : {order};
      if (order !== "resume" && !confirm("Really " + event.target.textContent + "?")) return;
      const answer = await fetch("/api/orders", {
        method: "POST",
        headers: {"Content-Type": "application/json", Authorization: "Bearer " + operator.elements.token.value},
        body: JSON.stringify(asked),
      }).then((found) => found.json(), () => ({text: "this page's process is away"}));
      operator.elements.answer.textContent = answer.text;
    });
  }

  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !typing && form) {
      event.preventDefault();
      form.elements.q.focus();
    }
    if (event.key === "Escape" && typing) event.target.blur();
  });

  listen();
})();
