// The last minutes of one or more figures, as lines that share an axis from 0.
//
// Before: a value each second. After: a painted canvas. Keeps a fixed number of values.

const KEPT = 240;
const COLOURS = ["#2f78b7", "#d9962b", "#5a3d9a"];

export class Graph {
  constructor(canvas, numLines = 1) {
    this.canvas = canvas;
    this.lines = Array.from({ length: numLines }, () => []);
  }

  add(...values) {
    this.lines.forEach((line, at) => {
      line.push(values[at]);
      if (line.length > KEPT) line.shift();
    });
    this.draw();
  }

  draw() {
    const { canvas } = this;
    canvas.width = canvas.clientWidth * devicePixelRatio;
    canvas.height = canvas.clientHeight * devicePixelRatio;
    const brush = canvas.getContext("2d");
    const top = Math.max(...this.lines.flat().filter(Number.isFinite), 1e-9) * 1.1;
    brush.lineWidth = 1.5 * devicePixelRatio;
    this.lines.forEach((line, at) => {
      brush.strokeStyle = COLOURS[at];
      brush.beginPath();
      line.forEach((value, x) => {
        if (Number.isFinite(value)) brush.lineTo((x / (KEPT - 1)) * canvas.width, canvas.height * (1 - value / top));
      });
      brush.stroke();
    });
  }
}
