# The part of the Python driver that shows matplotlib's figures: a backend that makes each one a result
# of the run, as PNG and as the data of its chart.
import io
import re

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import _casemate as driver


class FigureManager(FigureManagerBase):
    def show(self):
        show_figure(self.canvas.figure)

    @classmethod
    def pyplot_show(cls, *_args, **_kwargs):
        show()


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager


def new_figure_manager(num, *args, FigureClass=Figure, **kwargs):
    return new_figure_manager_given_figure(num, FigureClass(*args, **kwargs))


def new_figure_manager_given_figure(num, figure):
    return FigureManager(FigureCanvas(figure), num)


def show(*_args, **_kwargs):
    """pyplot.show, and the end of each run: show what is open, and close it."""
    try:
        for manager in list(Gcf.get_all_fig_managers()):
            if isinstance(manager, FigureManager):
                show_figure(manager.canvas.figure, again=False)
    finally:
        for manager in list(Gcf.get_all_fig_managers()):
            if isinstance(manager, FigureManager):
                Gcf.destroy(manager.num)


flush = show
if driver.Run.shell is not None:
    driver.Run.shell.display_formatter.formatters["image/png"].for_type(Figure, lambda figure: png(figure))


def show_figure(figure, again=True):
    """Show a figure; once is enough where nothing was drawn since."""
    if not again and getattr(figure, "_casemate_shown", False) and not figure.stale:
        return
    driver.show(figure)


def add(figure, data):
    """Add a figure's picture and chart to what there is to show of it."""
    if not any(key.startswith("image/") for key in data):
        data["image/png"] = png(figure)
    try:
        chart = chart_of(figure)
    except Exception as e:
        chart = None
        driver.warn_repr(figure, "chart", e)
    if chart is not None:
        data["chart"] = chart
    figure._casemate_shown = True
    figure.stale = False  # asking for ticks lays them out


def png(figure):
    out = io.BytesIO()
    if figure.canvas is None or not hasattr(figure.canvas, "print_figure"):
        FigureCanvasAgg(figure)
    figure.canvas.print_figure(
        out,
        format="png",
        dpi=figure.dpi,
        facecolor=figure.get_facecolor(),
        edgecolor=figure.get_edgecolor(),
        bbox_inches="tight",
    )
    return out.getvalue()


# --- the data of charts ------------------------------------------------------------------------

UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")


def chart_of(figure):
    """Return a figure's data; None where there is none."""
    axes = [ax for ax in figure.axes if not is_colorbar(ax)]
    if not any(ax.has_data() or drawn(ax) for ax in axes):
        return None
    if len(axes) == 1:
        return chart_of_axes(axes[0])
    title = figure._suptitle.get_text() if figure._suptitle is not None else ""
    return {"type": "superchart", "title": title, "elements": [chart_of_axes(ax) for ax in axes]}


def is_colorbar(ax):
    return getattr(ax, "_colorbar", None) is not None


def drawn(ax):
    """Return what code has drawn into axes, without texts."""
    from matplotlib.text import Text

    children = getattr(ax, "_children", None)
    if children is None:
        children = [*ax.collections, *ax.patches, *ax.lines, *ax.images, *ax.tables, *ax.artists]
    return [child for child in children if not isinstance(child, Text)]


def chart_of_axes(ax):
    from matplotlib.collections import PathCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import PathPatch, Rectangle, Wedge

    objects = drawn(ax)

    def all_are(*kinds):
        return all(isinstance(o, kinds) for o in objects)

    if all_are(Line2D):
        return boxes_of_lines(ax) or line_chart(ax)
    if all_are(PathPatch, Line2D):
        return box_chart(ax)
    objects = [o for o in objects if not (isinstance(o, Line2D) and is_guide(o))]
    if all_are(PathCollection):
        return scatter_chart(ax)
    if all_are(Wedge):
        return pie_chart(ax)
    if all_are(Rectangle):
        return bar_chart(ax)
    return {"type": "unknown", "title": ax.get_title() or None, "elements": []}


def is_guide(line):
    """Report whether a line only guides the eye: two points, across or along."""
    x, y = line.get_xdata(), line.get_ydata()
    return len(x) == 2 and len(y) == 2 and bool(x[0] == x[1] or y[0] == y[1])


def flat_chart(kind, ax, swapped=False):
    """Return what charts with two axes have in common; swapped: the values run along x."""
    x, y = ax.get_xlabel() or None, ax.get_ylabel() or None
    if swapped:
        x, y = y, x
    return {
        "type": kind,
        "title": ax.get_title() or None,
        "elements": [],
        "x_label": x,
        "y_label": y,
        "x_unit": unit(x),
        "y_unit": unit(y),
    }


def unit(label):
    found = UNIT.search(label or "")
    return (found.group(1) or found.group(2)) if found else None


def point_chart(kind, ax):
    chart = flat_chart(kind, ax)
    for name, axis, scale in (("x", ax.xaxis, ax.get_xscale()), ("y", ax.yaxis, ax.get_yscale())):
        labels = [label.get_text() for label in axis.get_ticklabels()]
        ticks = [number(t) for t in axis.get_ticklocs()]
        chart[name + "_scale"] = scale_of(axis, scale, ticks, labels)
        if is_date(axis):
            ticks = [date_text(t) for t in ticks]
        chart[name + "_ticks"], chart[name + "_tick_labels"] = ticks, labels
    return chart


def converter_of(axis):
    get = getattr(axis, "get_converter", None)
    return get() if get is not None else getattr(axis, "converter", None)


def is_date(axis):
    return type(converter_of(axis)).__name__ in ("_SwitchableDateConverter", "DateConverter", "ConciseDateConverter")


def scale_of(axis, scale, ticks, labels):
    if is_date(axis):
        return "datetime"
    if scale != "linear" or not ticks:
        return scale
    if type(converter_of(axis)).__name__ == "StrCategoryConverter":
        return "categorical"
    named = all(tick == i and label != str(i) for i, (tick, label) in enumerate(zip(ticks, labels)))
    return "categorical" if named and "".join(labels[: len(ticks)]) else "linear"


def date_text(value):
    from matplotlib.dates import num2date

    return num2date(value).isoformat()


def number(value):
    return float(value)


def point(value):
    """Return one coordinate: a number, or the text of a date or category."""
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind == "M":
        return str(value.astype("datetime64[s]"))
    if kind == "m":
        return str(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def line_chart(ax):
    chart = point_chart("line", ax)
    for line in ax.get_lines():
        if is_guide(line):
            continue
        label = str(line.get_label())
        if label.startswith("_child"):
            label = "Line " + label[len("_child"):]
        points = [[point(x), point(y)] for x, y in zip(line.get_xdata(), line.get_ydata())]
        chart["elements"].append({"label": label, "points": points})
    return chart


def scatter_chart(ax):
    chart = point_chart("scatter", ax)
    dates = is_date(ax.xaxis), is_date(ax.yaxis)
    for collection in ax.collections:
        points = [
            [date_text(v) if date else number(v) for v, date in zip(pair, dates)] for pair in collection.get_offsets()
        ]
        chart["elements"].append({"label": str(collection.get_label()), "points": points})
    return chart


def significant(value):
    """Round to eight digits or so, as many as a person could mean."""
    value = float(value)
    if value == 0 or value - value != 0:
        return value
    exponent = int(f"{value:e}".partition("e")[2])
    return float(f"{value:.{max(1, 8 - exponent)}g}")


def pie_chart(ax):
    from matplotlib.patches import Wedge

    elements = [
        {"label": str(w.get_label()), "angle": abs(significant(w.theta2 - w.theta1)), "radius": float(w.r)}
        for w in ax.patches
        if isinstance(w, Wedge)
    ]
    return {"type": "pie", "title": ax.get_title() or None, "elements": elements}


def bar_chart(ax):
    containers = [c for c in ax.containers if len(c) and hasattr(c[0], "get_height")]
    lying = bool(containers) and all(lies(c) for c in containers)
    chart = flat_chart("bar", ax, swapped=lying)
    axis = ax.yaxis if lying else ax.xaxis
    for container in containers:
        group = str(container.get_label())
        if group.startswith("_container"):
            group = "Group " + group[len("_container"):]
        for label, bar in zip(bar_labels(axis, container, lying), container):
            value = bar.get_width() if lying else bar.get_height()
            chart["elements"].append({"label": label, "group": group, "value": number(value)})
    return chart


def lies(container):
    orientation = getattr(container, "orientation", None)
    if orientation is not None:
        return orientation == "horizontal"
    heights = [bar.get_height() for bar in container]
    return all(height == heights[0] for height in heights)


def bar_labels(axis, container, lying):
    """Return the names of bars: of the ticks, where each bar has one, else the bars' own places."""
    ticks = list(axis.get_ticklocs())
    texts = [label.get_text() for label in axis.get_ticklabels()]
    middles = [
        bar.get_y() + bar.get_height() / 2 if lying else bar.get_x() + bar.get_width() / 2 for bar in container
    ]
    named = type(converter_of(axis)).__name__ == "StrCategoryConverter" or type(
        axis.get_major_formatter()
    ).__name__ in ("FixedFormatter", "FuncFormatter")
    labels = []
    for i, middle in enumerate(middles):
        at = [text for tick, text in zip(ticks, texts) if text and abs(tick - middle) < 1e-6 * max(1, abs(middle))]
        if at:
            labels.append(at[0])
        elif named and len(texts) == len(middles):
            labels.append(texts[i])
        elif is_date(axis):
            labels.append(date_text(middle))
        else:
            labels.append(f"{middle:g}")
    return labels


def box_chart(ax):
    """Read box plots whose boxes are patches."""
    boxes = [p.get_path().vertices for p in ax.patches]
    return box_elements(ax, boxes, ax.lines)


def boxes_of_lines(ax):
    """Read box plots whose boxes are lines, matplotlib's default; None where there are none."""
    boxes, rest = [], []
    for line in ax.lines:
        xy = line.get_xydata() if len(line.get_xdata()) == 5 else None
        if xy is not None and is_rectangle(xy):
            boxes.append(xy)
        else:
            rest.append(line)
    if not boxes or len(rest) < 5 * len(boxes):
        return None
    return box_elements(ax, boxes, rest)


def is_rectangle(xy):
    xs, ys = {float(x) for x in xy[:, 0]}, {float(y) for y in xy[:, 1]}
    return len(xs) == 2 and len(ys) == 2 and tuple(xy[0]) == tuple(xy[-1])


def box_elements(ax, outlines, lines):
    boxes = []
    for outline in outlines:
        xs, ys = [significant(v) for v in outline[:, 0]], [significant(v) for v in outline[:, 1]]
        boxes.append({"across": (min(xs), max(xs)), "along": (min(ys), max(ys)), "outliers": []})
    # Boxes stand upright when all have the same width: the other way round, the same height.
    widths = {significant(b["across"][1] - b["across"][0]) for b in boxes}
    heights = {significant(b["along"][1] - b["along"][0]) for b in boxes}
    lying = len(heights) == 1 and (len(widths) > 1 or median_runs_up(boxes, lines))
    if lying:
        for box in boxes:
            box["across"], box["along"] = box["along"], box["across"]
    chart = flat_chart("box_and_whisker", ax, swapped=lying)
    axis = ax.yaxis if lying else ax.xaxis
    for line in lines:
        across, along = [significant(v) for v in line.get_xdata()], [significant(v) for v in line.get_ydata()]
        if lying:
            across, along = along, across
        sort_line(boxes, across, along)
    for label, box in zip([t.get_text() for t in axis.get_ticklabels()], boxes):
        first, third = box["along"]
        chart["elements"].append(
            {
                "label": label,
                "min": box.get("lower", first),
                "first_quartile": first,
                "median": box.get("median", first),
                "third_quartile": third,
                "max": box.get("upper", third),
                "outliers": box["outliers"],
            }
        )
    return chart


def median_runs_up(boxes, lines):
    """Report whether a line inside the first box runs from its bottom to its top, as medians of lying boxes do."""
    (left, right), (low, high) = boxes[0]["across"], boxes[0]["along"]
    for line in lines:
        x, y = [significant(v) for v in line.get_xdata()], [significant(v) for v in line.get_ydata()]
        if len(x) == 2 and x[0] == x[1] and left <= x[0] <= right and {y[0], y[1]} == {low, high}:
            return True
    return False


def sort_line(boxes, across, along):
    """Find the box that a line belongs to, and what it says of it."""
    if not across:
        return
    for box in boxes:
        left, right = box["across"]
        if left <= min(across) and max(across) <= right:
            break
    else:
        return
    first, third = box["along"]
    if len(set(across)) == 1 and len(along) != 2:
        box["outliers"].extend(along)
    elif len(along) == 2 and along[0] == along[1] and first <= along[0] <= third and (across[0], across[1]) != ():
        if across[0] != across[1]:
            box.setdefault("median", along[0])
    elif len(along) == 2:
        low, high = min(along), max(along)
        if high == first:
            box["lower"] = low
        elif low == third:
            box["upper"] = high
