# The Python driver: it keeps an interpreter's variables between runs, and tells what each run shows.
#
# It speaks newline-delimited JSON on descriptor 3; package drivers describes the messages. It needs
# nothing but the standard library, and uses IPython's machinery where IPython is installed. It runs in
# one process with the code that it serves, so nothing that it says can be trusted more than that code.
#
# LAZY, the sources of parts that most contexts never need, is put in front of this text.
import sys
import os
import _thread
import ast
import binascii
import builtins
import collections
import io
import json
import linecache
import _signal  # signal's own functions turn every number into an enum
import types

HERE = "<casemate>"  # the file name of this code: its frames are left out of tracebacks
MESSAGE_LIMIT = 16 << 20  # bytes of one message, also the other side's limit
HELD_RESULTS = 64  # results shown between runs, kept for the next one
KEPT_OUTPUTS = 16  # values that Out and _1, _2 ... keep alive
KEPT_CELLS = 1000  # cells whose source tracebacks can show ...
KEPT_SOURCE = 4 << 20  # ... and their characters together
TABLE_CELLS = 200_000  # values of a table that are sent as data; more is cut, and said so
JSON_ITEMS = 10_000  # items of a list or dict that is also sent as JSON
COROUTINE = 0x80  # inspect.CO_COROUTINE, without importing inspect

MAIN_THREAD = _thread.get_ident()
# What the driver itself uses: code may replace these names, and must not break it by that.
_os_write, _os_read = os.write, os.read
_get_ident = _thread.get_ident
_set_signal, _get_signal, SIGINT = _signal.signal, _signal.getsignal, _signal.SIGINT
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_scan = json.JSONDecoder().scan_once  # C's part of json.loads: a line is one value and nothing else
_real_print, _real_exit = builtins.print, os._exit



def _decode(line):
    return _scan(line.decode("utf-8", "surrogatepass"), 0)[0]


# --- interrupts --------------------------------------------------------------------------------


class Interrupt:
    """Whether SIGINT may raise KeyboardInterrupt: only while code of a run is at work, and never
    between the halves of a message."""

    armed = False
    masked = 0
    pending = False


def on_sigint(_signum, _frame):
    if not Interrupt.armed:
        return
    if Interrupt.masked:
        Interrupt.pending = True
        return
    interrupt()


def interrupt():
    """Tell the guest that an interrupt has come, so that it sends no other for it, and raise it."""
    try:
        if CONTROL.fd >= 0 and Run.id is not None:
            with CONTROL.lock:  # what is held stays so: this may have come while it changes
                write_all(CONTROL.fd, (_encode({"ev": "interrupted", "id": Run.id}) + "\n").encode("ascii"))
    except OSError:  # the guest is gone
        pass
    raise KeyboardInterrupt


def write_all(fd, data):
    """Write every byte of data. An interrupt that comes meanwhile is raised after the last byte, so
    that no message and no character is cut in half."""
    main = _get_ident() == MAIN_THREAD
    if main:
        Interrupt.masked += 1
    try:
        view = memoryview(data)
        while view:
            try:
                view = view[_os_write(fd, view):]
            except BlockingIOError:  # a program that shared this pipe made it non-blocking
                import select

                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll(1000)
    finally:
        if main:
            Interrupt.masked -= 1
            if Interrupt.pending and not Interrupt.masked:
                Interrupt.pending = False
                if Interrupt.armed:
                    interrupt()


# --- messages ----------------------------------------------------------------------------------


class Control:
    """The socket to the guest."""

    def __init__(self, fd):
        self.fd = fd
        self.buffer = bytearray()
        self.searched = 0
        self.lock = _thread.RLock()
        self.held = b""  # a message that goes out with the next one

    def receive(self):
        """Return the next message; None at the end."""
        while True:
            line = self.next_line()
            if line is not None:
                return _decode(line)
            if not self.fill():
                return None

    def next_line(self):
        end = self.buffer.find(b"\n", self.searched)
        if end < 0:
            self.searched = len(self.buffer)
            return None
        line = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        self.searched = 0
        return line

    def fill(self):
        try:
            chunk = _os_read(self.fd, 1 << 16)
        except OSError:
            return False
        self.buffer += chunk
        return bool(chunk)

    def send(self, message, hold=False):
        """Send a message; with hold together with the next one, so that the guest wakes up once for both."""
        if self.fd < 0:
            return  # a forked child has no way to the guest
        try:
            line = _encode(message)
        except (ValueError, TypeError, RecursionError):
            line = _encode(plain_json(message))
        if len(line) >= MESSAGE_LIMIT:
            line = _encode(shrink(message, len(line)))
        with self.lock:
            line, self.held = self.held + (line + "\n").encode("ascii"), b""
            if hold:
                self.held = line
            else:
                write_all(self.fd, line)

    def flush(self):
        """Send what is held."""
        with self.lock:
            line, self.held = self.held, b""
            if line and self.fd >= 0:
                write_all(self.fd, line)


def plain_json(value, depth=0):
    """Turn a value into one that JSON can hold; what it can't becomes its text."""
    kind = type(value)
    if value is None or kind in (bool, str, int):
        return value
    if kind is float:
        return value if value - value == 0 else None  # neither infinite nor not a number
    if depth > 50:
        return "..."
    if isinstance(value, dict):
        return {str(k): plain_json(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_json(v, depth + 1) for v in value]
    if isinstance(value, (bytes, bytearray)):
        return binascii.b2a_base64(value, newline=False).decode("ascii")
    if isinstance(value, (bool, int, float)):  # and classes made from them
        return plain_json(kind.__mro__[-2](value), depth + 1)
    item = getattr(value, "item", None)  # numpy's scalars
    if item is not None and getattr(value, "ndim", None) == 0:
        inner = item()
        if type(inner) is not kind:
            return plain_json(inner, depth + 1)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return str(value)


def shrink(message, size):
    """Replace what makes a message too long by a text that says so."""
    message = dict(message)
    if message.get("ev") == "result":
        data = plain_json(message["data"])
        left = MESSAGE_LIMIT // 2
        kept, dropped = {}, []
        for key in sorted(data, key=lambda k: len(_encode(data[k]))):
            need = len(_encode(data[key])) + len(key)
            if need <= left:
                kept[key] = data[key]
                left -= need
            else:
                dropped.append(f"{key} ({need >> 10} KB)")
        note = f"[not shown: {', '.join(dropped)}; a result may hold {MESSAGE_LIMIT >> 20} MB. Write it to a file instead.]"
        kept["text/plain"] = kept["text/plain"] + "\n" + note if "text/plain" in kept else note
        message.update(data=kept, metadata={})
        return message
    for key in ("traceback", "value"):
        text = message.get(key)
        if isinstance(text, str) and len(text) > 1 << 16:
            message[key] = text[: 1 << 15] + f"\n[... {size >> 10} KB in all ...]\n" + text[-(1 << 15):]
    return message


# --- standard output ---------------------------------------------------------------------------


class Descriptor(io.RawIOBase):
    """The binary layer of sys.stdout and sys.stderr. Everything goes out at once, so that it keeps its
    order with what C code and other programs write to the same descriptor."""

    def __init__(self, fd, name):
        self.fd, self.name, self.mode = fd, name, "wb"

    def writable(self):
        return True

    def fileno(self):
        return self.fd

    def isatty(self):
        return False

    def write(self, data):
        if CONTROL.held:
            CONTROL.flush()
        view = memoryview(data).cast("B")
        write_all(self.fd, view)
        return len(view)


def open_stream(fd, name):
    return io.TextIOWrapper(
        Descriptor(fd, name), encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True
    )


def make_print():
    """print writes each of its arguments and the end by itself; this one writes them in one piece."""

    def print(*args, sep=" ", end="\n", file=None, flush=False):
        if file is None:
            file = sys.stdout
        if (file is not STDOUT and file is not STDERR) or type(sep) is not str or type(end) is not str:
            return _real_print(*args, sep=sep, end=end, file=file, flush=flush)
        file.write((str(args[0]) if len(args) == 1 else sep.join(map(str, args))) + end)

    print.__doc__ = _real_print.__doc__
    print.__module__ = "builtins"
    print.__qualname__ = "print"
    return print


def flush_streams():
    """Write out what other layers still hold: a stream that code put in place of ours, and C's stdout."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not STDOUT and stream is not STDERR:
            try:
                stream.flush()
            except Exception:
                pass
    ctypes = sys.modules.get("ctypes")
    if ctypes is not None:
        try:
            libc = ctypes.CDLL(None)
            libc.fflush(ctypes.c_void_p.in_dll(libc, "stdout"))
        except Exception:
            pass


class NoInput(NotImplementedError):
    """Raised by input() and its like: nobody can answer in a code context."""


NoInput.__module__ = "builtins"


def no_input(prompt="", *_args, **_kwargs):
    raise NoInput(
        "input() can't be answered: code that runs in a context has no standard input. "
        "Put the value into the code, or read it from a file or an environment variable."
    )


def no_debugger(*_args, **_kwargs):
    raise NoInput("breakpoint() can't be used: code that runs in a context has no standard input.")


# --- results -----------------------------------------------------------------------------------


class Run:
    """The run at work, and what lasts from one run to the next."""

    id = None  # None between runs
    silent = False
    errored = False
    quiet = False  # the last expression ends with a semicolon
    last = None  # the code of the cell's last part, while it executes: after its value nothing comes
    count = 0
    held = collections.deque(maxlen=HELD_RESULTS)
    shell = None  # IPython's, where it is installed
    ns = None  # the variables
    loop = None  # asyncio's, once it is needed
    loop_used = False
    cell_name = ""
    forked = False


def publish(data, metadata=None, main=False, hold=False):
    """Send a result, with hold together with the message that follows."""
    if not data or (Run.silent and Run.id is not None):
        return
    for key, value in data.items():
        if isinstance(value, (bytes, bytearray)):
            data = {
                k: binascii.b2a_base64(v, newline=False).decode("ascii") if isinstance(v, (bytes, bytearray)) else v
                for k, v in data.items()
            }
            break
    if Run.forked:  # a child process: it shares the streams, but not the socket
        print(data.get("text/plain", ""))
        return
    message = {"ev": "result", "id": Run.id, "main": main, "data": data, "metadata": metadata or {}}
    if Run.id is None:
        Run.held.append(message)
        return
    flush_streams()
    CONTROL.send(message, hold)


REPR_METHODS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_pdf_", "application/pdf"),
    ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"),
    ("_repr_javascript_", "application/javascript"),
)
SIMPLE = (int, float, bool, complex, str, bytes, type(None))


def plain_text(obj):
    if type(obj) in (dict, list, tuple, set, frozenset):
        text = repr(obj)
        if len(text) > 79:
            import pprint

            return pprint.pformat(obj, sort_dicts=False)
        return text
    return repr(obj)


def bundle(obj):
    """Return what there is to show of an object, where IPython isn't installed: (data, metadata)."""
    data, metadata = {"text/plain": plain_text(obj)}, {}
    if type(obj) in SIMPLE or isinstance(obj, type):
        return data, metadata
    try:
        found = getattr(obj, "_repr_mimebundle_", None)
        if found is not None and not hasattr(obj, "_ipython_canary_method_should_not_exist_"):
            more = found(include=None, exclude=None)
            if isinstance(more, tuple):
                metadata.update(more[1])
                more = more[0]
            data.update(more or {})
    except Exception as e:
        warn_repr(obj, "_repr_mimebundle_", e)
    for method, mime in REPR_METHODS:
        if mime in data:
            continue
        try:
            found = getattr(obj, method, None)
            if found is None or hasattr(obj, "_ipython_canary_method_should_not_exist_"):
                continue
            value = found()
        except Exception as e:
            warn_repr(obj, method, e)
            continue
        if isinstance(value, tuple) and len(value) == 2:
            value, metadata[mime] = value
        if value is not None:
            data[mime] = value
    add_data(obj, data, metadata)
    return data, metadata


def warn_repr(obj, method, error):
    print(f"{type(obj).__name__}.{method} raised {type(error).__name__}: {error}", file=sys.stderr)


def add_data(obj, data, metadata):
    """Add what a program can use: a chart's data, a table's values, plain lists and dicts as JSON.
    Nothing is imported for it: an object of a library exists only where the library is loaded."""
    kind = type(obj)
    if kind in SIMPLE:
        return
    if kind in (dict, list):
        if "application/json" not in data and len(obj) <= JSON_ITEMS:
            try:
                if len(_encode(obj)) <= 1 << 20:
                    data["application/json"] = obj
            except (ValueError, TypeError, RecursionError):
                pass
        return
    figure = sys.modules.get("matplotlib.figure")
    if figure is not None and isinstance(obj, getattr(figure, "Figure", ())):
        import casemate_figures

        casemate_figures.add(obj, data)
        return
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(obj, (getattr(pandas, "DataFrame", ()), getattr(pandas, "Series", ()))):
        try:
            add_table(obj, data, metadata)
        except Exception as e:
            warn_repr(obj, "data", e)


def add_table(obj, data, metadata):
    frame = obj.to_frame(obj.name if obj.name is not None else "value") if obj.ndim == 1 else obj
    rows = len(frame)
    shown = min(rows, TABLE_CELLS // max(1, frame.shape[1]))
    table = {}
    for i, name in enumerate(frame.columns):
        key = str(name)
        while key in table:
            key += "_"
        # Python's own values: a column keeps its kind also where the frame mixes several.
        table[key] = [cell(v) for v in frame.iloc[:shown, i].tolist()]
    data["dataframe"] = table
    if shown < rows:
        metadata["dataframe"] = {"rows": rows, "shown": shown}


def cell(value):
    """Turn a table's value into one that JSON can hold."""
    kind = type(value)
    if kind is str or kind is int or kind is bool:
        return value
    if kind is float:
        return value if value - value == 0 else None
    pandas = sys.modules.get("pandas")
    if value is None or value is pandas.NaT or value is getattr(pandas, "NA", None):
        return None
    return plain_json(value)


def display(*objs, include=None, exclude=None, metadata=None, raw=False, clear=False, **_kwargs):
    """Show objects: each becomes a result of the run, in every form that it knows of itself."""
    for obj in objs:
        if raw:
            publish(dict(obj), metadata)
            continue
        data, meta = bundle(obj)
        if include:
            data = {k: v for k, v in data.items() if k in include}
        if exclude:
            data = {k: v for k, v in data.items() if k not in exclude}
        meta.update(metadata or {})
        publish(data, meta)


display.__module__ = "builtins"


def show(obj):
    """Show an object through IPython where it is, else by display."""
    if Run.shell is None:
        return display(obj)
    from IPython.display import display as show_it

    show_it(obj)


class Outputs:
    """_, __, ___, _1, _2 ... and Out: the newest main results."""

    ours = ["", "", ""]
    names = ("_", "__", "___")

    @classmethod
    def add(cls, value):
        ns, count = Run.ns, Run.count
        if "_" not in builtins.__dict__ and all(ns.get(n, o) is o for n, o in zip(cls.names, cls.ours)):
            cls.ours = [value] + cls.ours[:2]
            ns.update(zip(cls.names, cls.ours))
        if Run.silent:
            return
        out = ns.get("Out")
        if type(out) is not dict or out is value:
            return
        out[count] = value
        ns[f"_{count}"] = value
        while len(out) > KEPT_OUTPUTS:
            oldest = next(iter(out))
            del out[oldest]
            ns.pop(f"_{oldest}", None)


def show_value(value):
    """sys.displayhook: the value of the last expression."""
    if value is None or Run.quiet:
        return
    if Run.forked:
        print(repr(value))
        return
    kind = type(value)
    if kind in SIMPLE and (Run.shell is None or Run.shell.is_simple(kind)):
        data, metadata = {"text/plain": repr(value)}, None
    elif Run.shell is None:
        data, metadata = bundle(value)
    else:
        data, metadata = Run.shell.display_formatter.format(value)
    Outputs.add(value)
    frame = sys._getframe(1)
    if frame.f_code.co_filename == HERE:
        frame = frame.f_back  # IPython's hook is between
    code = frame.f_code
    publish(data, metadata, main=True, hold=code is Run.last and len(code.co_code) - frame.f_lasti == TAIL)


def tail():
    """Return how many bytes of code there are from where a value is shown to the end, where nothing follows."""
    found = []

    def hook(_value):
        frame = sys._getframe(1)
        found.append(len(frame.f_code.co_code) - frame.f_lasti)

    sys.displayhook, before = hook, sys.displayhook
    exec(compile("1", HERE, "single"), {})
    sys.displayhook = before
    return found[0]


TAIL = tail()


# --- errors ------------------------------------------------------------------------------------


def own_part(tb):
    """Return the part of a traceback that begins in the run's own code."""
    at = tb
    while at is not None and at.tb_frame.f_code.co_filename != Run.cell_name:
        at = at.tb_next
    first = last = None
    at = at or tb
    while at is not None:  # the driver's own frames tell nobody anything
        if at.tb_frame.f_code.co_filename != HERE:
            if last is None:
                first = at
            else:
                last.tb_next = at
            last = at
        at = at.tb_next
    if last is not None:
        last.tb_next = None
    return first


def text_of(error):
    try:
        return str(error)
    except BaseException as e:
        return f"<its text could not be made: {type(e).__name__}>"


def report(error):
    """Send the error that ended a run."""
    tb = own_part(error.__traceback__)
    try:
        error.__traceback__ = tb
    except Exception:
        pass
    kind = type(error)
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, tb
    if Run.forked:
        import traceback

        Run.errored = True
        traceback.print_exception(kind, error, tb)
        return
    try:
        text = format_error(kind, error, tb)
    except BaseException as e:  # an interrupt, or an error whose own text fails
        text = f"{kind.__name__}: {text_of(error)}\n(its traceback could not be made: {type(e).__name__})"
    send_error(kind.__name__, text_of(error), text)


def send_error(name, value, text):
    if Run.errored:  # a run has one error; more of them are output
        print(text, file=sys.stderr)
        return
    Run.errored = True
    flush_streams()
    CONTROL.send({"ev": "error", "id": Run.id, "name": name, "value": value, "traceback": text})


def format_error(kind, error, tb):
    if isinstance(error, SystemExit):
        return f"SystemExit: {text_of(error)}\n(The run ended here. The context goes on: its variables are kept.)"
    shell = Run.shell
    if shell is not None:
        text = shell.error_text(kind, error, tb)
        if text is not None:
            return text
    import traceback

    lines = traceback.format_exception(kind, error, tb)
    if isinstance(error, SyntaxError) and tb is None:
        lines = traceback.format_exception_only(kind, error)
        first = (error.text or "").lstrip()
        if shell is None and first[:1] in ("!", "%", "?"):
            lines.append(f"({first[:1]} commands need IPython, which is not installed here.)\n")
    return "".join(lines).rstrip("\n")


# --- running code ------------------------------------------------------------------------------


class Cells:
    """The sources of cells, as linecache holds them for tracebacks; the oldest go."""

    sizes = {}  # by name, the oldest first
    total = 0

    @classmethod
    def add(cls, name, source):
        cls.total += len(source) - cls.sizes.pop(name, 0)
        cls.sizes[name] = len(source)
        while len(cls.sizes) > KEPT_CELLS or (cls.total > KEPT_SOURCE and len(cls.sizes) > 1):
            old = next(iter(cls.sizes))
            cls.total -= cls.sizes.pop(old)
            linecache.cache.pop(old, None)
            if Run.shell is not None:
                Run.shell.forget_cell(old)

    @classmethod
    def name(cls, source, raw):
        """Return the file name of a cell's code, and let tracebacks find its source."""
        if Run.shell is not None:
            name = Run.shell.compile.cache(source, Run.count, raw_code=raw)
        else:
            name = f"Cell In[{Run.count}]"
            linecache.cache[name] = (len(source), None, [line + "\n" for line in source.splitlines()], name)
        cls.add(name, source)
        return name


FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class Compiler:
    """Compiles cells where IPython isn't there: __future__ imports last, as in one file."""

    def __init__(self):
        import codeop

        self.compile = codeop.Compile()

    def parse(self, source, name):
        return compile(source, name, "exec", self.compile.flags | ast.PyCF_ONLY_AST | FLAGS, True)

    def __call__(self, tree, name, mode):
        self.compile.flags |= FLAGS
        return self.compile(tree, name, mode)


def parse(code):
    """Return a cell's syntax tree, and the file name that it goes by."""
    if Run.shell is not None:
        return Run.shell.parse(code)
    name = Cells.name(code, code)
    try:
        return COMPILER.parse(code, name), name
    except IndentationError:
        import textwrap

        flat = textwrap.dedent(code)  # a cell that was cut out of an indented text
        if flat == code:
            raise
        name = Cells.name(flat, code)
        return COMPILER.parse(flat, name), name


def ends_with_semicolon(code):
    last = code.rstrip()
    last = last[last.rfind("\n") + 1:]
    if "#" not in last:
        return last.endswith(";")
    if ";" not in code:
        return False
    import tokenize

    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    skip = (tokenize.ENDMARKER, tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.DEDENT)
    for token in reversed(tokens):
        if token[0] not in skip:
            return token[1] == ";"
    return False


def code_objects(tree, name):
    """Return the code of a cell: what comes before its last expression, and that expression, whose
    value is shown."""
    body, shell = tree.body, Run.shell
    compiler = COMPILER if shell is None else shell.compile_cell
    mode = "last_expr" if shell is None else shell.ast_node_interactivity
    if mode == "last_expr_or_assign" and body:
        target = shell.assigned_name(body[-1])
        if target is not None:
            body.append(target)
        mode = "last_expr"
    if mode == "all":
        shown = len(body)
    elif mode == "none" or not body or (mode == "last_expr" and not isinstance(body[-1], ast.Expr)):
        shown = 0
    else:
        shown = 1
    rest = body[: len(body) - shown]
    codes = [compiler(ast.Module(rest, []), name, "exec")] if rest else []
    codes.extend(compiler(ast.Interactive([node]), name, "single") for node in body[len(body) - shown:])
    return codes


def run_code(code):
    tree, name = parse(code)
    Run.cell_name = name
    if Run.shell is not None:
        tree = Run.shell.transform_tree(tree)
    codes = code_objects(tree, name)
    Run.quiet = ends_with_semicolon(code)
    ns = Run.ns
    sys.displayhook = DISPLAYHOOK
    if any(c.co_flags & COROUTINE for c in codes):
        run_in_loop(run_codes(codes, ns))
        return
    for c in codes:
        Run.last = c if c is codes[-1] else None
        exec(c, ns)


async def run_codes(codes, ns):
    for c in codes:
        Run.last = c if c is codes[-1] else None
        value = eval(c, ns)
        if c.co_flags & COROUTINE:
            await value


# --- asyncio -----------------------------------------------------------------------------------


def get_loop():
    """Return the event loop of the context: tasks that a run leaves behind go on in it."""
    import asyncio

    if Run.loop is None or Run.loop.is_closed():
        Run.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(Run.loop)
    return Run.loop


def prepare_loop(code):
    """Let code find an event loop where it asks for one without a running one."""
    if Run.loop is None and "asyncio" not in code:
        return
    asyncio = sys.modules.get("asyncio")
    if asyncio is None and "asyncio" not in code:
        return
    loop = get_loop()
    import asyncio

    asyncio.set_event_loop(loop)  # asyncio.run leaves none behind


def run_in_loop(coroutine):
    """Run a coroutine to its end. An interrupt cancels it, and shows where it was."""
    import asyncio

    loop = get_loop()
    Run.loop_used = True
    task = loop.create_task(coroutine)
    try:
        return loop.run_until_complete(task)
    except KeyboardInterrupt:
        if task.done():
            raise
    for _ in range(100):  # until the code lets itself be canceled; each further interrupt counts too
        task.cancel()
        try:
            loop.run_until_complete(asyncio.wait([task], timeout=1))
        except KeyboardInterrupt:
            continue
        if task.done():
            break
    if not task.done():
        raise KeyboardInterrupt
    if task.cancelled():
        try:
            task.result()
        except asyncio.CancelledError as e:
            raise KeyboardInterrupt().with_traceback(e.__traceback__) from None
    return task.result()


def loop_has_work():
    loop = Run.loop
    if loop is None or loop.is_closed():
        return False
    if Run.loop_used:
        return True
    try:
        return bool(loop._ready or loop._scheduled or len(loop._selector.get_map()) > 1)
    except AttributeError:  # another kind of loop: it may have work
        return True


def receive():
    """Wait for the next message, while the tasks of earlier runs go on."""
    line = CONTROL.next_line()
    if line is not None:
        return _decode(line)
    if not loop_has_work():
        return CONTROL.receive()
    loop, result = Run.loop, []

    def readable():
        if not CONTROL.fill():
            result.append(None)
        else:
            got = CONTROL.next_line()
            if got is None:
                return
            result.append(_decode(got))
        loop.stop()

    import asyncio

    asyncio.set_event_loop(loop)
    loop.add_reader(CONTROL.fd, readable)
    try:
        while not result:
            loop.run_forever()
    except RuntimeError:  # code closed the loop, or runs it in a thread of its own
        return CONTROL.receive() if not result else result[0]
    finally:
        if not loop.is_closed():
            loop.remove_reader(CONTROL.fd)
    return result[0]


# --- one run -----------------------------------------------------------------------------------


def set_env(env):
    """Put a run's own variables in, and return how to undo that."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    return before


def undo_env(before):
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def handle_run(message):
    Run.id, Run.silent, Run.errored, Run.quiet = message["id"], bool(message.get("silent")), False, False
    Run.cell_name, Run.last = "", None
    if not Run.silent:
        Run.count += 1
    code = message["code"]
    while Run.held:
        CONTROL.send(dict(Run.held.popleft(), id=Run.id))
    env = message.get("env")
    before = set_env(env) if env else {}
    if _get_signal(SIGINT) is not on_sigint:
        _set_signal(SIGINT, on_sigint)
    # An interrupt may strike at any place where one is armed, also right before it is disarmed: so
    # each step has its own guard, and the last lines run disarmed.
    guard(lambda: run_cell(code))
    guard(finish_cell)
    if Run.forked:
        leave_fork()
    undo_env(before)
    flush_streams()
    run, Run.id = Run.id, None
    CONTROL.send({"ev": "end", "id": run, "count": Run.count})


def guard(step):
    """Run a step in which interrupts are let through, and report what it raises."""
    try:
        try:
            Interrupt.pending = False
            Interrupt.armed = True
            step()
        finally:
            Interrupt.armed = False
    except BaseException as e:
        disarm()
        report_guarded(e)
    disarm()


def disarm():
    while True:
        try:
            Interrupt.armed = False
            return
        except KeyboardInterrupt:
            continue


def report_guarded(error):
    """Report an error. Making its text runs code of the user's, which an interrupt must be able to end."""
    try:
        try:
            Interrupt.armed = True
            report(error)
        finally:
            Interrupt.armed = False
    except BaseException as e:
        disarm()
        send_error(type(error).__name__, "", f"{type(error).__name__} (and {type(e).__name__} while it was shown)")
    disarm()


def run_cell(code):
    prepare_loop(code)
    if Run.shell is not None:
        Run.shell.before_cell(code, Run.silent)
        try:
            run_code(code)
        finally:
            Run.shell.after_cell()
    else:
        run_code(code)


def finish_cell():
    figures = sys.modules.get("casemate_figures")
    if figures is not None:
        CONTROL.flush()  # a picture takes its time
        figures.flush()


def leave_fork():
    """A child that code forked came back out of the run: it ends here, as a script would."""
    flush_streams()
    error = sys.exc_info()[1]
    _real_exit(1 if Run.errored or error is not None else 0)


def after_fork_in_child():
    """The socket belongs to the parent; what a child wrote there would be taken for its word."""
    global MAIN_THREAD
    MAIN_THREAD = _get_ident()
    Interrupt.masked = 0
    Interrupt.pending = False
    Run.forked = True
    if CONTROL.fd >= 0:
        try:
            os.close(CONTROL.fd)
        except OSError:
            pass
    CONTROL.fd, CONTROL.held = -1, b""
    CONTROL.lock = _thread.RLock()


# --- imports that the driver takes note of -----------------------------------------------------


class Imports:
    """A finder that lets the driver act when a library is imported, and never imports one itself."""

    hooks = {}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "casemate_figures":
            import importlib.machinery

            return importlib.machinery.ModuleSpec(name, cls)
        hook = cls.hooks.pop(name, None)
        if hook is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is cls else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            cls.hooks[name] = hook
            return None
        if spec.loader is not None and hasattr(spec.loader, "exec_module"):
            exec_module = spec.loader.exec_module

            def exec_then_hook(module):
                exec_module(module)
                try:
                    hook(module)
                except Exception as e:
                    print(f"{name}: {type(e).__name__}: {e}", file=sys.stderr)

            try:
                spec.loader.exec_module = exec_then_hook
            except AttributeError:
                pass
        return spec

    # As a loader, of casemate_figures:
    @staticmethod
    def create_module(_spec):
        return None

    @staticmethod
    def exec_module(module):
        exec(compile(LAZY["figures"], HERE, "exec"), module.__dict__)


def on_matplotlib(matplotlib):
    """Figures are shown as results, unless code or its settings chose another backend."""
    if os.environ.get("MPLBACKEND"):
        return
    chosen = dict.__getitem__(matplotlib.rcParams, "backend")
    if isinstance(chosen, str):
        return
    matplotlib.rcParams["backend"] = "module://casemate_figures"


def on_pil_image(module):
    """Show pictures that are saved under a name (CASEMATE_SHOW_SAVED_IMAGES)."""
    save = module.Image.save

    def save_and_show(self, fp, *args, **kwargs):
        save(self, fp, *args, **kwargs)
        if isinstance(fp, (str, os.PathLike)):
            show(self)

    save_and_show.__doc__ = save.__doc__
    save_and_show.__name__ = "save"
    module.Image.save = save_and_show


# --- start -------------------------------------------------------------------------------------


def start_ipython(main):
    """Set IPython up, if it is there; a broken one must not break the context."""
    try:
        import importlib.util

        if importlib.util.find_spec("IPython") is None:
            return None
        module = types.ModuleType("casemate_ipython")
        module.__dict__["driver"] = sys.modules[__name__]
        exec(compile(LAZY["ipython"], HERE, "exec"), module.__dict__)
        return module.start(main)
    except Exception as e:
        import traceback

        print(f"IPython could not be set up, so the context goes without it: {type(e).__name__}: {e}", file=sys.stderr)
        print(traceback.format_exc(), file=sys.stderr)
        return None


def move_high(fd):
    """Move a descriptor out of the way of code that uses low ones, and keep it from other programs."""
    import fcntl

    for low in (500, 100, 10):
        try:
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, low)
        except OSError:
            continue
        os.close(fd)
        return high
    os.set_inheritable(fd, False)
    return fd


def take_control():
    """Take the socket over, and close the source's descriptor."""
    try:
        os.close(4)
    except OSError:
        pass
    return Control(move_high(3))


def start():
    global CONTROL, STDOUT, STDERR, COMPILER, DISPLAYHOOK
    _set_signal(SIGINT, on_sigint)
    CONTROL = take_control()
    STDOUT, STDERR = open_stream(1, "<stdout>"), open_stream(2, "<stderr>")
    sys.stdout = sys.__stdout__ = STDOUT
    sys.stderr = sys.__stderr__ = STDERR
    builtins.print = make_print()
    builtins.input = no_input
    sys.breakpointhook = no_debugger
    sys.argv = [""]
    os.register_at_fork(after_in_child=after_fork_in_child)
    import faulthandler

    faulthandler.enable(2)  # what killed the context shows on its stderr

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    Run.ns = main.__dict__
    Imports.hooks["matplotlib"] = on_matplotlib
    if os.environ.pop("CASEMATE_SHOW_SAVED_IMAGES", "") == "1":
        Imports.hooks["PIL.Image"] = on_pil_image
    Run.shell = start_ipython(main)
    if Run.shell is None:
        COMPILER, DISPLAYHOOK = Compiler(), show_value
        sys.displayhook = show_value
        Run.ns.update(display=display, Out={}, _="", __="", ___="")
    else:
        DISPLAYHOOK = Run.shell.displayhook
        Run.ns = Run.shell.user_ns
    sys.meta_path.insert(0, Imports)
    CONTROL.send(ready())


def ready():
    """Return the first message."""
    return {
        "ev": "ready",
        "language": "python",
        "version": ".".join(map(str, sys.version_info[:3])),
        "ipython": Run.shell is not None,
        "pid": os.getpid(),
        "answers_interrupts": True,
    }


def serve():
    """Answer messages until the guest closes the socket."""
    while True:
        try:
            message = receive()
            if message is None:
                break
            op = message.get("op")
            if op == "run":
                handle_run(message)
            elif op == "zygote":
                module = types.ModuleType("casemate_zygote")
                module.__dict__["driver"] = sys.modules[__name__]
                exec(compile(LAZY["zygote"], HERE, "exec"), module.__dict__)
                module.serve(message)
                break
        except KeyboardInterrupt:
            disarm()
    leave()


def leave():
    """End the process as an interpreter ends, but wait for no thread."""
    try:
        import atexit

        atexit._run_exitfuncs()
    except BaseException:
        pass
    flush_streams()
    _real_exit(0)


CONTROL = STDOUT = STDERR = COMPILER = DISPLAYHOOK = None
start()
serve()
