# The part of the Python driver that uses IPython: its display machinery, formatters, magics and
# tracebacks, without its kernel. `driver` is the driver's module.
import ast
import os
import sys

CO_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def load():
    """Import IPython without what a driver never uses: completion's parser is slow to load."""
    blocked = [name for name in ("jedi",) if name not in sys.modules]
    for name in blocked:
        sys.modules[name] = None
    try:
        import IPython.core.interactiveshell as module
    finally:
        for name in blocked:
            if sys.modules.get(name, 0) is None:
                del sys.modules[name]
    return module


base = load()
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.formatters import DisplayFormatter
from traitlets import Type
from traitlets.config import Config


class Hook(DisplayHook):
    """sys.displayhook."""

    def __call__(self, result=None):
        driver.show_value(result)

    def quiet(self):
        return driver.Run.quiet


class Publisher(DisplayPublisher):
    """Where display() goes."""

    def publish(self, data, metadata=None, source=None, **_kwargs):
        driver.publish(dict(data), metadata)

    def clear_output(self, wait=False):
        pass  # what was sent was sent


class Formatter(DisplayFormatter):
    """IPython's forms of an object, and those that a program can use."""

    def format(self, obj, include=None, exclude=None):
        data, metadata = super().format(obj, include=include, exclude=exclude)
        if data and not include and not exclude:
            driver.add_data(obj, data, metadata)
        return data, metadata


class Shell(base.InteractiveShell):
    """IPython's shell, with a run of our own in place of run_cell, which takes a millisecond."""

    displayhook_class = Type(Hook)
    display_pub_class = Type(Publisher)

    def init_display_formatter(self):
        self.display_formatter = Formatter(parent=self)
        self.configurables.append(self.display_formatter)

    def init_virtualenv(self):
        pass  # the interpreter that runs is the one that was chosen

    def enable_gui(self, gui=None):
        if gui and gui != "inline":  # older ones call the backend so
            print(f"there is no screen here: event loop {gui!r} is not available", file=sys.stderr)

    def ask_exit(self):
        raise SystemExit(0)

    def system(self, cmd):
        """Run a shell command (!cmd) on our own stdout and stderr, so that all keeps its order."""
        import subprocess

        driver.flush_streams()
        child = subprocess.Popen(
            self.var_expand(cmd, depth=1), shell=True, executable=shell_program(), stdin=subprocess.DEVNULL
        )
        try:
            code = child.wait()
        except BaseException:
            stop(child)
            raise
        self.user_ns["_exit_code"] = code

    system_piped = system_raw = system

    # --- what the driver calls ---

    def prepare(self):
        formatters = list(self.display_formatter.formatters.values())
        formatters.append(getattr(self.display_formatter, "mimebundle_formatter", None))
        self.type_printers = [f.type_printers for f in formatters if f is not None]
        self.plain_transformers = self.transformers()
        self.simple_printers = {kind: self.printers(kind) for kind in driver.SIMPLE}
        self.simple_settings = self.text_settings()
        self.builtin_trap.__enter__()  # get_ipython, display ... stay in builtins
        self.pending = None

    def transformers(self):
        manager = self.input_transformer_manager
        return (
            len(self.input_transformers_post),
            len(self.input_transformers_cleanup),
            len(manager.line_transforms),
            len(manager.token_transformers),
            len(manager.cleanup_transforms),
        )

    def printers(self, kind):
        return [printers.get(kind) for printers in self.type_printers]

    def text_settings(self):
        text = self.display_formatter.formatters["text/plain"]
        return text.float_precision, text.pprint, self.display_formatter.active_types

    def is_simple(self, kind):
        """Report whether a value of a built-in type is shown by its repr and nothing else."""
        if kind is str:
            return False  # long ones are split over lines
        return self.printers(kind) == self.simple_printers[kind] and self.text_settings() == self.simple_settings

    def is_plain(self, code):
        """Report whether IPython would take a cell that is valid Python as it stands: a line such as
        "ls -l" is both an expression and a magic command."""
        if self.transformers() != self.plain_transformers:
            return False
        line = code.strip()
        if "\n" in line:
            return True
        word = ""
        for c in line:
            if not (c.isalnum() or c == "_"):
                break
            word += c
        if word in self.user_ns:
            value = self.user_ns[word]
            return type(value).__name__ not in ("Macro", "ExitAutocall", "ZMQExitAutocall") and not hasattr(
                type(value), "rewrite"
            )
        if self.autocall:
            return False
        return word not in self.magics_manager.magics["line"] and not self.alias_manager.is_alias(word)

    def parse(self, code):
        if self.is_plain(code):
            try:
                tree = self.tree_of(code, "<cell>")
            except (SyntaxError, ValueError):
                tree = None
            if tree is not None:
                return tree, driver.Cells.name(code, code)
        try:
            cell = self.transform_cell(code)
        except SyntaxError as e:
            raise e.with_traceback(None)
        name = driver.Cells.name(cell, code)
        return self.tree_of(cell, name), name

    def tree_of(self, code, name):
        return compile(code, name, "exec", self.compile.flags | ast.PyCF_ONLY_AST | CO_FLAGS, True)

    def transform_tree(self, tree):
        if self.ast_transformers:
            return self.transform_ast(tree)
        return tree

    def compile_cell(self, tree, name, mode):
        with self.compile.extra_flags(CO_FLAGS):
            return self.compile(tree, name, mode)

    @staticmethod
    def assigned_name(node):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            target = node.target
        else:
            return None
        if not isinstance(target, ast.Name):
            return None
        name = ast.Expr(ast.Name(target.id, ast.Load()))
        return ast.fix_missing_locations(ast.copy_location(name, node))

    def before_cell(self, code, silent):
        self.execution_count = driver.Run.count
        manager = self.history_manager
        if not silent:
            for lines in (manager.input_hist_parsed, manager.input_hist_raw):
                lines.append(code)
                if len(lines) > driver.KEPT_CELLS:
                    lines[len(lines) - driver.KEPT_CELLS] = ""
        callbacks = self.events.callbacks
        if callbacks["pre_execute"]:
            self.events.trigger("pre_execute")
        if not silent and callbacks["pre_run_cell"]:
            self.events.trigger("pre_run_cell", self.cell_info(code, silent))
        self.pending = (code, silent)

    @staticmethod
    def cell_info(code, silent):
        return base.ExecutionInfo(code, not silent, silent, True, None)

    def after_cell(self):
        callbacks = self.events.callbacks
        if callbacks["post_execute"] or callbacks["post_run_cell"]:
            driver.CONTROL.flush()  # before what they print
        if callbacks["post_execute"]:
            self.events.trigger("post_execute")
        code, silent = self.pending
        if not silent and callbacks["post_run_cell"]:
            result = base.ExecutionResult(self.cell_info(code, silent))
            result.execution_count = self.execution_count
            result.error_in_exec = sys.exc_info()[1]
            self.events.trigger("post_run_cell", result)
        for numbered in (self.history_manager.output_hist_reprs, getattr(self.history_manager, "outputs", {})):
            if numbered:
                numbered.clear()

    def forget_cell(self, name):
        self.compile._filename_map.pop(name, None)

    def error_text(self, kind, error, tb):
        """Return what IPython shows of an error; None leaves it to Python."""
        if kind is UsageError:
            return f"UsageError: {error}"
        if sys.version_info >= (3, 11) and contains_group(error):
            return None
        custom = getattr(error, "_render_traceback_", None)
        if custom is not None:
            lines = custom()
        elif isinstance(error, SyntaxError) and tb is None:
            lines = self.SyntaxTB.structured_traceback(kind, error, [])
        elif isinstance(error, SyntaxError):
            import traceback

            lines = self.SyntaxTB.structured_traceback(kind, error, traceback.extract_tb(tb))
        else:
            lines = self.InteractiveTB.structured_traceback(kind, error, tb, tb_offset=0)
        self.trim_traceback_caches()
        return "\n".join(lines).rstrip("\n")

    def trim_traceback_caches(self):
        """Traceback libraries keep the syntax tree of every file that they saw, and each cell is one."""
        for module in ("executing.executing", "stack_data.core"):
            source = getattr(sys.modules.get(module), "Source", None)
            for cls in getattr(source, "__mro__", ())[:-1]:
                for value in list(vars(cls).values()):
                    if isinstance(value, dict):
                        for key in [k for k in value if self.is_of_cell(k)]:
                            del value[key]
                    elif hasattr(value, "cache_clear"):
                        value.cache_clear()
        executing = sys.modules.get("executing.executing")
        statement_cache = getattr(getattr(executing, "statement_containing_node", None), "cache_clear", None)
        if statement_cache is not None:
            statement_cache()

    def is_of_cell(self, key):
        first = key[0] if isinstance(key, tuple) and key else key
        return getattr(first, "co_filename", first) in self.compile._filename_map

    def _showtraceback(self, etype, evalue, stb):
        """What IPython itself shows, such as %tb, or an error in a hook."""
        driver.send_error(getattr(etype, "__name__", str(etype)), driver.text_of(evalue), "\n".join(stb).rstrip("\n"))


def contains_group(error):
    seen = 0
    while error is not None and seen < 50:
        if isinstance(error, BaseExceptionGroup):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def shell_program():
    return "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


def stop(child):
    """End a shell command whose run was interrupted: it gets the interrupt, then less kind signals."""
    import signal
    import subprocess

    for number, wait in ((signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGKILL, 5)):
        try:
            child.send_signal(number)
            child.wait(wait)
            return
        except subprocess.TimeoutExpired:
            continue
        except KeyboardInterrupt:
            continue


def start(main):
    """Make the shell. It keeps no history, and no directory of its own."""
    import shutil
    import tempfile

    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.Completer.use_jedi = False
    major = int(base.release.version.split(".")[0]) if hasattr(base, "release") else version()
    config.InteractiveShell.colors = "nocolor" if major >= 9 else "NoColor"
    config.InteractiveShell.cache_size = 0
    place = tempfile.mkdtemp(prefix="ipython-")
    before = os.environ.get("IPYTHONDIR")
    try:
        shell = Shell.instance(config=config, ipython_dir=place, user_module=main)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if before is None:
            os.environ.pop("IPYTHONDIR", None)
    shell.user_ns.setdefault("Out", {})
    shell.loop_runner = driver.run_in_loop
    shell.prepare()
    sys.displayhook = shell.displayhook
    return shell


def version():
    import IPython

    return IPython.version_info[0]
