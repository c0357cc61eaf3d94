"use strict";
// The page of a replay. All text from the file is set through textContent, so that none of it becomes markup.
(() => {
  const replay = JSON.parse(document.getElementById("replay").textContent);
  const { world, frames, result, meta } = replay;
  const X = 0, Y = 1, FACING = 2, HEALTH = 3, COOLDOWN = 4; // the columns of a unit's row
  const LAST = frames.length - 1;
  const MOST_EVENTS = 500; // a longer list is slow and not useful
  const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];
  const byId = (id) => document.getElementById(id);
  const canvas = byId("arena"), pen = canvas.getContext("2d");
  const scrub = byId("scrub"), speed = byId("speed"), arcs = byId("arcs");
  const state = { at: 0, playing: false, clock: 0, scale: 1, colours: {} }; // `at` is the frame shown, between two of them while playing

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // ---- names ------------------------------------------------------------------------------------------------------------------

  const names = (() => {
    const counts = [0, 0];
    return world.units.map((unit) => `${[...unit.kind][0].toUpperCase()}${++counts[unit.team]}`);
  })();
  const players = meta.players || ["", ""];
  const teamName = (team) => world.teams[team] + (players[team] ? ` (${players[team]})` : "");
  const unitName = (index) => `${world.teams[world.units[index].team]} ${names[index]}`;
  const rounded = (value) => (Number.isInteger(value) ? String(value) : value.toFixed(1));
  const seconds = (frame) => `${(frame * world.step_seconds).toFixed(world.step_seconds < 0.1 ? 2 : 1)} s`;
  const isAlive = (row) => row[HEALTH] > 0;

  // ---- what happened ----------------------------------------------------------------------------------------------------------

  const slowest = world.units.map((_, index) => frames.reduce((most, frame) => Math.max(most, frame.units[index][COOLDOWN]), 1e-9));

  /** Which team scores for the zone in a frame: 0, 1, "both" if units of both are in it, or null. */
  const holders = frames.map((frame, number) => {
    const before = number ? frames[number - 1].score : [0, 0];
    const gains = [frame.score[0] - before[0], frame.score[1] - before[1]];
    if (gains[0] > gains[1] && gains[0] > 0) return 0;
    if (gains[1] > gains[0] && gains[1] > 0) return 1;
    const present = [false, false];
    frame.units.forEach((row, index) => {
      const inside = Math.hypot(row[X] - world.zone.x, row[Y] - world.zone.y) <= world.zone.radius;
      if (isAlive(row) && inside) present[world.units[index].team] = true;
    });
    return present[0] && present[1] ? "both" : null;
  });

  /** "blue S1, S2 and H3 kill red H3", or "red H3 dies" if no shot hit it. */
  function killText(frame, index) {
    const killers = frame.shots.filter(([, target, hit]) => hit && target === index).map(([shooter]) => shooter);
    if (!killers.length) return `${unitName(index)} dies`;
    const same = killers.every((killer) => world.units[killer].team === world.units[killers[0]].team);
    const listed = killers.map((killer, place) => (place && same ? names[killer] : unitName(killer)));
    const last = listed.pop();
    return listed.length ? `${listed.join(", ")} and ${last} kill ${unitName(index)}` : `${last} kills ${unitName(index)}`;
  }

  const events = (() => {
    const found = [];
    let holder = null;
    for (let number = 0; number <= LAST; number++) {
      const frame = frames[number];
      for (let index = 0; number && index < world.units.length; index++) {
        if (isAlive(frames[number - 1].units[index]) && !isAlive(frame.units[index])) {
          found.push({ number, team: 1 - world.units[index].team, text: killText(frame, index) });
        }
      }
      if ((holders[number] === 0 || holders[number] === 1) && holders[number] !== holder) {
        holder = holders[number];
        found.push({ number, team: holder, text: `${world.teams[holder]} takes the zone` });
      }
    }
    if (found.length > MOST_EVENTS) found.length = MOST_EVENTS;
    found.push({ number: LAST, team: result ? result.winner : null, text: resultText() });
    return found;
  })();

  function resultText() {
    if (!result) return "the recording ends";
    const how = { elimination: "by elimination", zone: "by zone score", time: "on time" }[result.reason];
    return result.winner === null ? `draw ${how}` : `${teamName(result.winner)} wins ${how}`;
  }

  // ---- the parts of the page that do not change ------------------------------------------------------------------------------

  function build() {
    document.title = `Replay: ${world.game}`;
    byId("title").textContent = world.game;
    const sizes = [0, 1].map((team) => world.units.filter((unit) => unit.team === team).length);
    byId("subtitle").textContent = `${teamName(0)} against ${teamName(1)}, ${sizes[0]} v ${sizes[1]}, ${LAST} step${LAST === 1 ? "" : "s"}`;
    [0, 1].forEach((team) => {
      byId(`side-${team}`).querySelector(".team").textContent = world.teams[team];
      byId(`side-${team}`).querySelector(".player").textContent = players[team];
    });
    scrub.max = String(LAST);
    world.units.forEach((unit, index) => byId("units").append(unitRow(unit, index)));
    events.forEach((event) => byId("events").append(eventRow(event)));
    events.forEach((event) => byId("marks").append(mark(event)));
    for (const [name, value] of Object.entries(meta)) {
      byId("meta").append(element("dt", "", name), element("dd", "", typeof value === "string" ? value : JSON.stringify(value)));
    }
    byId("about").hidden = !Object.keys(meta).length;
    byId("banner").textContent = resultText();
    if (result && result.winner !== null) byId("banner").classList.add(`win-${result.winner}`);
  }

  function unitRow(unit, index) {
    const row = element("li", `team-${unit.team}`), bar = element("span", "bar"), kind = element("span", "kind", unit.kind);
    kind.append(" ", element("span", "place"));
    bar.append(element("i"));
    row.append(element("span", "badge", names[index]), kind, element("span", "health"), bar);
    return row;
  }

  function eventRow(event) {
    const row = element("li", event.team === null ? "" : `team-${event.team}`), button = element("button");
    button.type = "button";
    button.append(element("time", "", seconds(event.number)), element("span", "", event.text));
    button.addEventListener("click", () => { pause(); seek(event.number); });
    row.append(button);
    return row;
  }

  function mark(event) {
    const made = element("i", event.team === null ? "" : `team-${event.team}`);
    made.style.left = `${LAST ? (100 * event.number) / LAST : 0}%`;
    return made;
  }

  // ---- the parts that change --------------------------------------------------------------------------------------------------

  function show() {
    const number = Math.floor(state.at), frame = frames[number];
    if (document.body.dataset.frame !== String(number)) {
      document.body.dataset.frame = String(number);
      scrub.value = String(number);
      scrub.setAttribute("aria-valuetext", `step ${number} of ${LAST}, ${seconds(number)}`);
      byId("step").textContent = `step ${number} / ${LAST}`;
      byId("clock").textContent = seconds(number);
      byId("zone-state").textContent = zoneText(holders[number]);
      [0, 1].forEach((team) => { byId(`side-${team}`).querySelector(".score").textContent = rounded(frame.score[team]); });
      frame.units.forEach(showUnit);
      showEvents(number);
      byId("banner").hidden = number !== LAST;
      canvas.setAttribute("aria-label", describe(number));
    }
    draw();
  }

  /** Mark the events of this frame, and scroll to the latest one. */
  function showEvents(number) {
    const list = byId("events");
    let latest = list.firstChild;
    events.forEach((event, index) => {
      const row = list.children[index];
      row.firstChild.classList.toggle("now", event.number === number);
      if (event.number <= number) latest = row;
    });
    const over = latest.offsetTop + latest.offsetHeight - list.scrollTop - list.clientHeight;
    if (over > 0) list.scrollTop += over;
    else if (latest.offsetTop < list.scrollTop) list.scrollTop = latest.offsetTop;
  }

  function zoneText(holder) {
    if (holder === null) return "zone: neutral";
    return holder === "both" ? "zone: contested" : `zone: ${world.teams[holder]}`;
  }

  function showUnit(row, index) {
    const item = byId("units").children[index], most = world.units[index].max_health, share = row[HEALTH] / most;
    item.classList.toggle("dead", !isAlive(row));
    item.querySelector(".health").textContent = isAlive(row) ? `${rounded(row[HEALTH])} / ${rounded(most)}` : "dead";
    item.querySelector(".place").textContent = `${row[X].toFixed(1)}, ${row[Y].toFixed(1)}`;
    const bar = item.querySelector(".bar i");
    bar.style.width = `${100 * share}%`;
    bar.className = healthClass(share);
  }

  const healthClass = (share) => (share > 0.6 ? "healthy" : share > 0.3 ? "hurt" : "dying");

  function describe(number) {
    const alive = [0, 0];
    frames[number].units.forEach((row, index) => { if (isAlive(row)) alive[world.units[index].team]++; });
    return `The arena at ${seconds(number)}: ${world.teams[0]} has ${alive[0]} alive, ${world.teams[1]} has ${alive[1]}`;
  }

  // ---- drawing ----------------------------------------------------------------------------------------------------------------

  const VARIABLES = ["ground", "grid", "wall", "zone", "team-0", "team-1", "on-team", "healthy", "hurt", "dying", "empty", "cooling", "card", "ink"];

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    VARIABLES.forEach((name) => { state.colours[name] = style.getPropertyValue(`--${name}`).trim(); });
  }

  function resize() {
    const room = byId("stage").clientWidth, tall = Math.max(220, window.innerHeight * 0.72);
    const across = Math.max(1, Math.min(room, (tall * world.width) / world.height)), dense = window.devicePixelRatio || 1;
    const down = Math.max(1, Math.min(tall, (across * world.height) / world.width));
    canvas.width = Math.round(across * dense);
    canvas.height = Math.round(down * dense);
    canvas.style.width = `${across}px`;
    canvas.style.height = `${down}px`;
    state.dense = dense;
    state.scale = across / world.width;
    draw();
  }

  const toX = (x) => x * state.scale;
  const toY = (y) => (world.height - y) * state.scale; // y points upwards in the world

  /** Interpolate the units between two frames: straight lines, and turns the shorter way. */
  function between() {
    const number = Math.floor(state.at), part = state.at - number, rows = frames[number].units;
    if (!part) return rows;
    return rows.map((row, index) => {
      const next = frames[number + 1].units[index];
      if (!isAlive(row)) return row;
      const turn = Math.atan2(Math.sin(next[FACING] - row[FACING]), Math.cos(next[FACING] - row[FACING]));
      const mix = (column) => row[column] + part * (next[column] - row[column]);
      return [mix(X), mix(Y), row[FACING] + part * turn, row[HEALTH], Math.min(row[COOLDOWN], mix(COOLDOWN))];
    });
  }

  function draw() {
    const rows = between(), number = Math.floor(state.at);
    pen.setTransform(state.dense, 0, 0, state.dense, 0, 0);
    drawGround(number);
    const order = rows.map((_, index) => index).sort((a, b) => isAlive(rows[a]) - isAlive(rows[b]));
    if (arcs.checked) order.forEach((index) => { if (isAlive(rows[index])) drawArc(rows[index], world.units[index]); });
    drawWalls();
    order.forEach((index) => { if (!isAlive(rows[index])) drawDead(rows[index], world.units[index]); });
    frames[number].shots.forEach((shot) => drawShot(shot, rows, 1 - (state.at - number)));
    order.forEach((index) => { if (isAlive(rows[index])) drawUnit(rows[index], index); });
    order.forEach((index) => { if (isAlive(rows[index])) drawBars(rows[index], index); });
  }

  function drawGround(number) {
    const { colours, scale } = state, wide = world.width * scale, high = world.height * scale, holder = holders[number];
    pen.globalAlpha = 1;
    pen.fillStyle = colours.ground;
    pen.fillRect(0, 0, wide, high);
    pen.strokeStyle = colours.grid;
    pen.lineWidth = 1;
    pen.beginPath();
    const gap = 10 ** Math.ceil(Math.log10(Math.max(world.width, world.height) / 25)) / (Math.max(world.width, world.height) > 25 ? 2 : 1);
    for (let x = gap; x < world.width; x += gap) { pen.moveTo(toX(x), 0); pen.lineTo(toX(x), high); }
    for (let y = gap; y < world.height; y += gap) { pen.moveTo(0, toY(y)); pen.lineTo(wide, toY(y)); }
    pen.stroke();
    const colour = holder === 0 || holder === 1 ? colours[`team-${holder}`] : colours.zone;
    disc(world.zone.x, world.zone.y, world.zone.radius * scale);
    pen.fillStyle = pen.strokeStyle = colour;
    pen.globalAlpha = 0.14;
    pen.fill();
    pen.globalAlpha = 0.9;
    pen.lineWidth = 2;
    pen.setLineDash(holder === "both" ? [3, 5] : holder === null ? [8, 6] : []);
    pen.stroke();
    pen.setLineDash([]);
  }

  function drawWalls() {
    pen.globalAlpha = 1;
    pen.fillStyle = pen.strokeStyle = state.colours.wall;
    world.walls.forEach(([x0, y0, x1, y1]) => {
      const [left, right, low, high] = [Math.min(x0, x1), Math.max(x0, x1), Math.min(y0, y1), Math.max(y0, y1)];
      pen.fillRect(toX(left), toY(high), Math.max(2, (right - left) * state.scale), Math.max(2, (high - low) * state.scale));
    });
    pen.lineWidth = 2;
    pen.strokeRect(1, 1, world.width * state.scale - 2, world.height * state.scale - 2);
  }

  function disc(x, y, radius) {
    pen.beginPath();
    pen.arc(toX(x), toY(y), Math.max(0, radius), 0, 2 * Math.PI);
  }

  const sizeOf = (unit) => Math.max(6, unit.radius * state.scale);

  function drawArc(row, unit) {
    const x = toX(row[X]), y = toY(row[Y]), half = unit.arc / 2, reach = unit.range * state.scale;
    pen.beginPath();
    if (unit.arc < 6.28) pen.moveTo(x, y);
    pen.arc(x, y, reach, -row[FACING] - half, -row[FACING] + half); // the canvas turns the other way round
    if (unit.arc < 6.28) pen.closePath();
    pen.fillStyle = pen.strokeStyle = state.colours[`team-${unit.team}`];
    pen.globalAlpha = 0.06;
    pen.fill();
    pen.globalAlpha = 0.3;
    pen.lineWidth = 1;
    pen.stroke();
  }

  function drawUnit(row, index) {
    const unit = world.units[index], size = sizeOf(unit), x = toX(row[X]), y = toY(row[Y]), { colours } = state;
    const colour = colours[`team-${unit.team}`], nose = size + Math.max(4, size * 0.45);
    pen.globalAlpha = 1;
    pen.fillStyle = colour;
    pen.beginPath(); // the nose shows where it faces
    [[nose, 0], [size * 0.9, 0.45], [size * 0.9, -0.45]].forEach(([far, turn], corner) => {
      const angle = -row[FACING] + turn;
      pen[corner ? "lineTo" : "moveTo"](x + far * Math.cos(angle), y + far * Math.sin(angle));
    });
    pen.fill();
    disc(row[X], row[Y], size);
    pen.fill();
    if (unit.team) { // a ring, so that the teams differ without colours as well
      disc(row[X], row[Y], size * 0.74);
      pen.fillStyle = colours.card;
      pen.fill();
    }
    const text = size >= 11 ? names[index] : names[index].replace(/\d+$/, "");
    pen.fillStyle = unit.team ? colours.ink : colours["on-team"];
    pen.font = `700 ${Math.max(8, Math.min(16, size * (size >= 11 ? 0.78 : 1.15)))}px system-ui, "DejaVu Sans", sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(text, x, y + 0.5, size * 1.7);
  }

  function drawDead(row, unit) {
    const x = toX(row[X]), y = toY(row[Y]), size = sizeOf(unit) * 0.6;
    pen.globalAlpha = 0.55;
    pen.strokeStyle = state.colours[`team-${unit.team}`];
    pen.lineWidth = 3;
    pen.beginPath();
    pen.moveTo(x - size, y - size); pen.lineTo(x + size, y + size);
    pen.moveTo(x - size, y + size); pen.lineTo(x + size, y - size);
    pen.stroke();
  }

  function drawBars(row, index) {
    const unit = world.units[index], size = sizeOf(unit), wide = Math.max(size < 9 ? 14 : 22, size * 2), share = row[HEALTH] / unit.max_health;
    const left = Math.min(Math.max(2, toX(row[X]) - wide / 2), world.width * state.scale - wide - 2);
    const above = toY(row[Y]) - size - 13, top = above < 3 ? toY(row[Y]) + size + 6 : above;
    const bar = (y, high, part, colour) => {
      pen.fillStyle = state.colours.card; // a rim, so that bars that overlap stay apart
      pen.fillRect(left - 1, y - 1, wide + 2, high + 2);
      pen.fillStyle = state.colours.empty;
      pen.fillRect(left, y, wide, high);
      pen.fillStyle = state.colours[colour];
      pen.fillRect(left, y, wide * part, high);
    };
    pen.globalAlpha = 1;
    bar(top, 4, share, healthClass(share));
    if (row[COOLDOWN] > 0 && size >= 9) bar(top + 5, 2, Math.min(1, row[COOLDOWN] / slowest[index]), "cooling");
  }

  function drawShot([shooter, target, hit], rows, fresh) {
    const [from, to] = [rows[shooter], rows[target]];
    pen.globalAlpha = 0.15 + 0.85 * fresh;
    pen.strokeStyle = pen.fillStyle = state.colours[`team-${world.units[shooter].team}`];
    pen.lineWidth = hit ? 2.5 : 1.5;
    pen.setLineDash(hit ? [] : [5, 5]);
    pen.beginPath();
    pen.moveTo(toX(from[X]), toY(from[Y]));
    pen.lineTo(toX(to[X]), toY(to[Y]));
    pen.stroke();
    pen.setLineDash([]);
    if (hit) { disc(to[X], to[Y], sizeOf(world.units[target]) + 3 + 6 * (1 - fresh)); pen.stroke(); }
  }

  // ---- playing ----------------------------------------------------------------------------------------------------------------

  function seek(to) {
    state.at = Math.max(0, Math.min(LAST, to));
    show();
  }

  function play() {
    if (state.at >= LAST) state.at = 0;
    state.playing = LAST > 0;
    state.clock = performance.now();
    showPlaying();
    requestAnimationFrame(tick);
  }

  function pause() {
    if (!state.playing) return;
    state.playing = false;
    state.at = Math.floor(state.at);
    showPlaying();
    show();
  }

  function showPlaying() {
    document.body.classList.toggle("playing", state.playing);
    byId("play").setAttribute("aria-label", state.playing ? "Pause" : "Play");
  }

  function tick(now) {
    if (!state.playing) return;
    const passed = Math.max(0, Math.min(250, now - state.clock)); // a page in the background does not jump ahead
    state.clock = now;
    state.at = Math.min(LAST, state.at + (passed / 1000 / world.step_seconds) * Number(speed.value));
    if (state.at >= LAST) pause();
    else requestAnimationFrame(tick);
    show();
  }

  const toggle = () => (state.playing ? pause() : play());
  const step = (by) => { pause(); seek(Math.floor(state.at) + by); };

  function faster(by) {
    const next = SPEEDS.indexOf(Number(speed.value)) + by;
    if (next in SPEEDS) speed.value = String(SPEEDS[next]);
  }

  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const own = event.target.closest("button, select, summary, input[type=checkbox]"); // these handle keys themselves
    if (own && (event.key === " " || event.key === "Enter" || own === speed)) return;
    const far = event.shiftKey ? 10 : 1;
    const actions = {
      " ": toggle, ArrowLeft: () => step(-far), ArrowRight: () => step(far), Home: () => step(-LAST - 1), End: () => step(LAST + 1),
      "+": () => faster(1), "=": () => faster(1), "-": () => faster(-1), a: () => { arcs.checked = !arcs.checked; draw(); },
    };
    const action = Object.hasOwn(actions, event.key) ? actions[event.key] : null;
    if (!action) return;
    event.preventDefault();
    action();
  }

  byId("play").addEventListener("click", toggle);
  canvas.addEventListener("click", toggle);
  byId("back").addEventListener("click", () => step(-1));
  byId("forward").addEventListener("click", () => step(1));
  scrub.addEventListener("input", () => { const to = Number(scrub.value); pause(); seek(to); });
  arcs.addEventListener("change", draw);
  document.addEventListener("keydown", key);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });
  window.addEventListener("resize", resize);
  build();
  readColours();
  resize();
  show();
})();
