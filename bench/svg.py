"""A line chart with logarithmic axes as SVG: what the plots of docs/ need and no more."""
import math
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 70, 20, 40, 60
COLOURS = ("#1f5fa8", "#c4501b", "#3b8f4a", "#7a4fa3")
MARKS = ("circle", "square")


def ticks(low, high):
    """1, 2, 5 times powers of ten within the range."""
    out, e = [], math.floor(math.log10(low))
    while 10 ** e <= high:
        out += [m * 10 ** e for m in (1, 2, 5) if low <= m * 10 ** e * 1.0001 and m * 10 ** e <= high * 1.0001]
        e += 1
    return out


class Axis:
    def __init__(self, values, start, end):
        self.low, self.high = min(values), max(values)
        if self.high < self.low * 1.01:
            self.high = self.low * 2
        span = math.log(self.high / self.low)
        self.low, self.high = self.low * math.exp(-0.05 * span), self.high * math.exp(0.05 * span)
        self.start, self.end = start, end

    def at(self, v):
        return self.start + (self.end - self.start) * math.log(v / self.low) / math.log(self.high / self.low)


def text(x, y, s, anchor="middle", **more):
    extra = "".join(' %s="%s"' % (k.replace("_", "-"), v) for k, v in more.items())
    return '<text x="%.1f" y="%.1f" text-anchor="%s"%s>%s</text>' % (x, y, anchor, extra, escape(s))


def mark(kind, x, y, colour):
    if kind == "circle":
        return '<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"/>' % (x, y, colour)
    return '<rect x="%.1f" y="%.1f" width="7" height="7" fill="%s"/>' % (x - 3.5, y - 3.5, colour)


def chart(title, x_label, y_label, series, note=""):
    """series: [(name, [(x, y), ...])], all positive."""
    x = Axis([p[0] for _, points in series for p in points], LEFT, WIDTH - RIGHT)
    y = Axis([p[1] for _, points in series for p in points], HEIGHT - BOTTOM, TOP)
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">' % (WIDTH, HEIGHT),
           '<rect width="100%" height="100%" fill="#ffffff"/>', text(WIDTH / 2, 22, title, font_size=15)]
    for v in sorted({p[0] for _, points in series for p in points}):
        out.append('<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#e4e4e4"/>' % (x.at(v), x.at(v), TOP, HEIGHT - BOTTOM))
        out.append(text(x.at(v), HEIGHT - BOTTOM + 16, "%g" % v))
    for v in ticks(y.low, y.high):
        out.append('<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#e4e4e4"/>' % (LEFT, WIDTH - RIGHT, y.at(v), y.at(v)))
        out.append(text(LEFT - 8, y.at(v) + 4, "%g" % v, "end"))
    out.append('<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="#555555"/>' % (LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM))
    for i, (name, points) in enumerate(series):
        colour, kind = COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]
        out.append('<polyline fill="none" stroke="%s" stroke-width="2" points="%s"/>' % (
            colour, " ".join("%.1f,%.1f" % (x.at(a), y.at(b)) for a, b in points)))
        out += [mark(kind, x.at(a), y.at(b), colour) for a, b in points]
        out.append(mark(kind, LEFT + 16, TOP + 17 + 18 * i, colour))
        out.append(text(LEFT + 26, TOP + 21 + 18 * i, name, "start"))
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 26, x_label))
    out.append(text(16, (TOP + HEIGHT - BOTTOM) / 2, y_label, transform="rotate(-90 16 %.1f)" % ((TOP + HEIGHT - BOTTOM) / 2)))
    out.append(text(WIDTH - RIGHT, HEIGHT - 8, note, "end", font_size=10, fill="#666666"))
    return "\n".join([*out, "</svg>", ""])
