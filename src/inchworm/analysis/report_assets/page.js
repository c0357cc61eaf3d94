"use strict";
// Reads values of a chart under the pointer, or with the arrow keys; on a page that is served live, fetches the newest one.
(() => {
  const tip = document.getElementById("tip");
  const number = value => Math.abs(value) >= 1e5 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(5)));

  function nearest(xs, wanted) {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low > 0 && wanted - xs[low - 1] < xs[low] - wanted ? low - 1 : low;
  }

  function hide() {
    document.querySelectorAll("svg.active").forEach(svg => svg.classList.remove("active"));
    tip.hidden = true;
  }

  function show(svg, wanted) {
    const data = svg.data || (svg.data = JSON.parse(svg.dataset.chart));
    const all = data.lines.filter(line => line.x.length);
    const steps = all.map(line => line.x[nearest(line.x, wanted)]);
    const step = steps.reduce((best, one) => Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best);
    svg.step = step;
    hide();
    tip.replaceChildren();
    const head = document.createElement("b");
    const place = step.toLocaleString("en");
    head.textContent = data.over.endsWith("s") ? `${place} ${data.over}` : `${data.over} ${place}`;
    tip.append(head);
    for (const line of all.slice(0, 12)) {
      const index = nearest(line.x, step), row = document.createElement("div"), key = document.createElement("i");
      key.className = `key c${line.colour}`;
      const band = line.low ? ` [${number(line.low[index])}, ${number(line.high[index])}]` : "";
      const at = Math.abs(line.x[index] - step) > (data.range[1] - data.range[0]) / 50 ? ` at ${line.x[index].toLocaleString("en")}` : "";
      row.append(key, `${line.name} ${number(line.y[index])}${band}${at}`);
      tip.append(row);
    }
    const [left, right] = data.area, [first, last] = data.range;
    const x = left + (right - left) * (step - first) / (last - first), box = svg.getBoundingClientRect();
    const cross = svg.querySelector(".cross");
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    svg.classList.add("active");
    tip.hidden = false;
    const at = box.left + x / svg.viewBox.baseVal.width * box.width, own = tip.getBoundingClientRect();
    tip.style.left = `${at + 14 + own.width > innerWidth ? Math.max(4, at - own.width - 14) : at + 14}px`;
    tip.style.top = `${Math.min(Math.max(4, box.top + 8), innerHeight - own.height - 4)}px`;
  }

  document.addEventListener("pointermove", event => {
    const svg = event.target.closest("svg[data-chart]");
    if (!svg) return hide();
    const data = svg.data || (svg.data = JSON.parse(svg.dataset.chart)), box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const [left, right] = data.area, [first, last] = data.range;
    show(svg, first + Math.min(1, Math.max(0, (x - left) / (right - left))) * (last - first));
  });
  document.addEventListener("keydown", event => {
    const svg = document.activeElement?.closest?.("svg[data-chart]"), by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!svg || !by) return;
    event.preventDefault();
    const data = svg.data || (svg.data = JSON.parse(svg.dataset.chart)), xs = data.lines[0].x;
    const now = svg.step === undefined ? -1 : nearest(xs, svg.step);
    show(svg, xs[Math.min(xs.length - 1, Math.max(0, now + by))]);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { passive: true });

  async function refresh() {
    const status = document.getElementById("live");
    try {
      const answer = await fetch("page", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const text = await answer.text(), page = document.getElementById("page");
      if (text !== refresh.last) {
        const open = [...page.querySelectorAll("details[open]")].map(one => one.id), top = scrollY;
        page.innerHTML = text;
        open.forEach(id => document.getElementById(id)?.setAttribute("open", ""));
        scrollTo(0, top);
        refresh.last = text;
        tip.hidden = true;
      }
      status.textContent = "live: refreshed every two seconds";
    } catch {
      status.textContent = "inchworm watch has ended; this is the last state";
    }
    setTimeout(refresh, 2000);
  }
  if (document.body.dataset.live) setTimeout(refresh, 1000);
})();
