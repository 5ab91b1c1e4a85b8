// What a person would see wrong on this page, posted as JSON to the page around it.
(() => {
  const page = document.documentElement;
  const found = { width: innerWidth, dark: matchMedia("(prefers-color-scheme: dark)").matches,
                  texts: 0, labels: 0, overflow: [], outside: [], overlap: [], broken: [], faint: [] };
  const say = (text) => text.trim().replace(/\s+/g, " ").slice(0, 60);
  if (page.scrollWidth > page.clientWidth) found.overflow.push(`page ${page.scrollWidth}`);

  const scrolls = (element, axis) => {
    for (let at = element; at; at = at.parentElement)
      if (/auto|scroll/.test(getComputedStyle(at)[axis])) return at;
    return null;
  };
  const shown = (element) => {
    const style = getComputedStyle(element), box = element.getBoundingClientRect();
    return box.width > 0 && box.height > 0 && style.visibility === "visible";
  };

  // Colours: [r, g, b, alpha].
  const parse = (text) => {
    const parts = text.match(/[\d.]+/g).map(Number);
    return [parts[0], parts[1], parts[2], parts.length > 3 ? parts[3] : 1];
  };
  const over = (top, under) => [0, 1, 2].map((k) => top[3] * top[k] + (1 - top[3]) * under[k]);
  const background = (element) => {
    const chain = [];
    for (let at = element; at; at = at.parentElement) chain.push(parse(getComputedStyle(at).backgroundColor));
    return chain.reverse().reduce((under, top) => [...over(top, under), 1], [255, 255, 255, 1]);
  };
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  found.ground = light(background(document.body));
  const opacity = (element) => {
    let all = 1;
    for (let at = element; at; at = at.parentElement) all *= Number(getComputedStyle(at).opacity);
    return all;
  };
  const judge = (color, under, element, text) => {
    const ink = over([color[0], color[1], color[2], color[3] * opacity(element)], under);
    const ratio = contrast(ink, under);
    if (ratio < 4.5) found.faint.push(`${ratio.toFixed(1)} ${say(text)}`);
  };

  // Text of HTML: each line of each text is a box.
  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("svg, script, style") || !shown(parent)) continue;
    found.texts += 1;
    const range = document.createRange();
    range.selectNodeContents(node);
    const sideways = scrolls(parent, "overflowX");
    for (const rect of range.getClientRects()) {
      if (rect.width < 1) continue;
      if (!sideways && (rect.right > page.clientWidth + 1 || rect.left < -1)) found.outside.push(say(node.data));
      const block = parent.closest("td, th");
      const own = block && block.getBoundingClientRect();
      if (own && (rect.right > own.right + 1 || rect.left < own.left - 1)) found.outside.push(say(node.data));
      if (!scrolls(parent, "overflowY")) boxes.push([rect, node.data, node]);
    }
    for (const word of node.data.matchAll(/\p{L}+/gu)) {
      if (word[0].length > 16) continue;
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter((r) => r.width > 0.5).map((r) => Math.round(r.top)));
      if (lines.size > 1) found.broken.push(word[0]);
    }
    judge(parse(getComputedStyle(parent).color), background(parent), parent, node.data);
  }

  // Text of drawings, before what is drawn behind it.
  for (const drawing of document.querySelectorAll("svg")) {
    const frame = drawing.getBoundingClientRect();
    if (!shown(drawing)) continue;
    const behind = [];
    for (const part of drawing.querySelectorAll("rect, path, text")) {
      if (part.closest("defs, clipPath, symbol, pattern")) continue;
      const rect = part.getBoundingClientRect(), style = getComputedStyle(part);
      if (part.tagName !== "text") {
        if (/^rgb/.test(style.fill)) behind.push([rect, parse(style.fill)]);
        continue;
      }
      if (!part.textContent.trim()) continue;
      found.labels += 1;
      boxes.push([rect, part.textContent, part]);
      if (rect.right > frame.right + 1 || rect.left < frame.left - 1 || rect.top < frame.top - 2 || rect.bottom > frame.bottom + 2)
        found.outside.push(say(part.textContent));
      const [x, y] = [(rect.left + rect.right) / 2, (rect.top + rect.bottom) / 2];
      const under = behind.filter(([r, c]) => c[3] && r.left <= x && x <= r.right && r.top <= y && y <= r.bottom).pop();
      judge(parse(style.fill), under ? under[1] : background(drawing.parentElement), part, part.textContent);
      const size = parseFloat(style.fontSize) * Math.abs(part.getScreenCTM().a || part.getScreenCTM().b);
      if (size < 9) found.faint.push(`${size.toFixed(1)} px ${say(part.textContent)}`);
    }
  }

  boxes.sort((a, b) => a[0].top - b[0].top);
  boxes.forEach(([one, text, node], place) => {
    for (let k = place + 1; k < boxes.length && boxes[k][0].top < one.bottom - 1; k += 1) {
      const [other, said, owner] = boxes[k];
      const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
      // Boxes of letters have some room above and below; a fifth of it may be shared.
      if (node !== owner && wide > 1 && high > 0.2 * Math.min(one.height, other.height))
        found.overlap.push(`${say(text)} | ${say(said)}`);
    }
  });
  parent.postMessage(JSON.stringify(found), "*");
})();
