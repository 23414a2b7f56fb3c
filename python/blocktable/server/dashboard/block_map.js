// The pool as a picture: one cell a block, its colour its use or its tenant.
//
// Before: the bytes of /dashboard/blocks. After: a painted canvas, and the block under the pointer. A frame writes one pixel for each
// block into an image that the canvas scales up, so 100,000 blocks take about a millisecond.

export const USES = ["null", "free", "free, cached", "held", "shared", "pinned", "parked"];
const USE_COLOURS = ["#808080", "#e4e7ea", "#9cc5e8", "#2f78b7", "#5a3d9a", "#d9962b", "#c0504d"];
const NOBODY = 0;
const SEVERAL = 255;

// Reads what the server sends: two counts of 4 bytes, the names of the tenants as JSON, a use for each block, a tenant for each.
export function decode(buffer) {
  const view = new DataView(buffer);
  const numBlocks = view.getUint32(0, true);
  const namesLength = view.getUint32(4, true);
  const names = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, namesLength)));
  const start = 8 + namesLength;
  return {
    numBlocks,
    names,
    uses: new Uint8Array(buffer, start, numBlocks),
    tenants: new Uint8Array(buffer, start + numBlocks, numBlocks),
  };
}

export function tenantOf(map, block) {
  const number = map.tenants[block];
  if (number === NOBODY) return null;
  return number === SEVERAL ? "several tenants" : map.names[number - 1] || "without a tenant";
}

// Columns and rows of square cells that fill a canvas of this shape with so many blocks.
export function grid(numBlocks, width, height) {
  const columns = Math.max(1, Math.ceil(Math.sqrt((numBlocks * width) / height)));
  return { columns, rows: Math.ceil(numBlocks / columns) };
}

export class BlockMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.image = document.createElement("canvas");
    this.map = null;
    this.paint = "use";
    this.frames = 0;
  }

  show(map) {
    this.map = map;
    this.draw();
  }

  draw() {
    if (this.map === null) return;
    const { numBlocks } = this.map;
    this.canvas.width = this.canvas.clientWidth * devicePixelRatio;
    this.canvas.height = this.canvas.clientHeight * devicePixelRatio;
    this.grid = grid(numBlocks, this.canvas.width, this.canvas.height);
    this.image.width = this.grid.columns;
    this.image.height = this.grid.rows;
    const brush = this.image.getContext("2d");
    const picture = brush.createImageData(this.grid.columns, this.grid.rows);
    const pixels = new Uint32Array(picture.data.buffer);
    const [codes, palette] = this.paint === "use" ? [this.map.uses, USE_PALETTE] : [this.map.tenants, TENANT_PALETTE];
    for (let block = 0; block < numBlocks; block++) pixels[block] = palette[codes[block]];
    brush.putImageData(picture, 0, 0);
    const onto = this.canvas.getContext("2d");
    onto.imageSmoothingEnabled = false;
    onto.drawImage(this.image, 0, 0, this.canvas.width, this.canvas.height);
    this.frames++;
  }

  // The block at a place of the page, or null.
  blockAt(clientX, clientY) {
    if (this.map === null) return null;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor(((clientX - box.left) / box.width) * this.grid.columns);
    const row = Math.floor(((clientY - box.top) / box.height) * this.grid.rows);
    const block = row * this.grid.columns + column;
    const isInside = column >= 0 && column < this.grid.columns && row >= 0 && block < this.map.numBlocks;
    return isInside ? block : null;
  }

  // [name, colour, blocks] of each kind that there is.
  legend() {
    if (this.map === null) return [];
    const counts = new Uint32Array(256);
    for (const code of this.paint === "use" ? this.map.uses : this.map.tenants) counts[code]++;
    const kinds = [...counts.keys()].filter((code) => counts[code] > 0);
    if (this.paint === "use") return kinds.map((code) => [USES[code], USE_COLOURS[code], counts[code]]);
    const name = (code) => {
      if (code === NOBODY) return "nobody";
      return code === SEVERAL ? "several tenants" : this.map.names[code - 1] || "without a tenant";
    };
    return kinds.map((code) => [name(code), tenantColour(code), counts[code]]);
  }
}

function tenantColour(code) {
  if (code === NOBODY) return "#e4e7ea";
  if (code === SEVERAL) return "#444444";
  // Turns of the golden angle: neighbours in number are far apart in hue.
  return `hsl(${Math.round((code * 137.508) % 360)} 60% 50%)`;
}

// Colours as the pixels of an image hold them, whatever the browser makes of their names.
function palette(colours) {
  const canvas = document.createElement("canvas");
  canvas.width = colours.length;
  canvas.height = 1;
  const brush = canvas.getContext("2d");
  colours.forEach((colour, at) => {
    brush.fillStyle = colour;
    brush.fillRect(at, 0, 1, 1);
  });
  return new Uint32Array(brush.getImageData(0, 0, colours.length, 1).data.buffer);
}

const USE_PALETTE = palette(USE_COLOURS);
const TENANT_PALETTE = palette([...Array(256).keys()].map(tenantColour));
