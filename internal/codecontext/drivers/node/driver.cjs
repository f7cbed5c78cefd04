// The Node.js driver: it keeps a JavaScript world between runs, and tells what each run shows.
//
// It speaks newline-delimited JSON on descriptor 3; package drivers describes the messages. Runs are
// scripts in one global scope. What keeps names of one run for the next, and makes import and await
// work at the top of a run, is a small rewriting by the syntax tree; lines keep their numbers.
// It runs in one process with the code that it serves, so nothing that it says can be trusted more
// than that code.
"use strict";
(require, language) => {
  const fs = require("fs");
  const inspectorAvailable = process.features.inspector;
  const { Module, createRequire } = require("module");
  const nodeModule = require("module");
  const net = require("net");
  const path = require("path");
  const { pathToFileURL } = require("url");
  const { Writable } = require("stream");
  const util = require("util");
  const vm = require("vm");
  const { Worker } = require("worker_threads");

  const CONTROL = 3;
  const MESSAGE_LIMIT = 16 << 20; // bytes of one message, also the other side's limit
  const JSON_LIMIT = 1 << 20; // of a value that is also sent as JSON
  const HELD_RESULTS = 64; // results shown between runs, kept for the next one

  const realExit = process.exit.bind(process);
  const sleeper = new Int32Array(new SharedArrayBuffer(4));

  // --- messages ----------------------------------------------------------------------------------

  const writeSync = fs.writeSync;

  function writeAll(fd, bytes) {
    while (bytes.length > 0) {
      try {
        bytes = bytes.subarray(writeSync(fd, bytes));
      } catch (e) {
        if (e.code !== "EAGAIN") throw e;
        Atomics.wait(sleeper, 0, 0, 1);
      }
    }
  }

  /**
   * stdout and stderr. Node's own keep in memory what a full pipe does not take; these wait. They keep no
   * state either: an interrupt may strike anywhere.
   */
  class Output extends Writable {
    constructor(fd) {
      super({ highWaterMark: 1 << 16 });
      this.fd = fd;
    }
    write(chunk, encoding, done) {
      if (typeof encoding === "function") [encoding, done] = [undefined, encoding];
      writeAll(this.fd, typeof chunk === "string" ? Buffer.from(chunk, encoding) : Buffer.from(chunk));
      if (done) process.nextTick(done);
      return true;
    }
    end(chunk, encoding, done) {
      if (chunk !== undefined && typeof chunk !== "function") this.write(chunk, encoding);
      for (const f of [chunk, encoding, done]) if (typeof f === "function") process.nextTick(f);
      return this;
    }
    destroy() {
      return this; // the descriptor stays: programs that code starts share it
    }
  }

  const ascii = (text) => text.replace(/[^\x00-\x7f]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));

  function send(message) {
    let line = ascii(JSON.stringify(message));
    if (line.length >= MESSAGE_LIMIT) line = ascii(JSON.stringify(shrink(message, line.length)));
    writeAll(CONTROL, Buffer.from(line + "\n", "latin1"));
  }

  /** Replace what makes a message too long by a text that says so. */
  function shrink(message, size) {
    if (message.ev === "result") {
      const data = {};
      const dropped = [];
      let left = MESSAGE_LIMIT / 2;
      const sized = Object.keys(message.data).map((key) => [key, ascii(JSON.stringify(message.data[key])).length]);
      for (const [key, need] of sized.sort((a, b) => a[1] - b[1])) {
        if (need <= left) {
          data[key] = message.data[key];
          left -= need;
        } else {
          dropped.push(`${key} (${need >> 10} KB)`);
        }
      }
      const note = `[not shown: ${dropped.join(", ")}; a result may hold ${MESSAGE_LIMIT >> 20} MB. Write it to a file instead.]`;
      data["text/plain"] = "text/plain" in data ? data["text/plain"] + "\n" + note : note;
      return { ...message, data, metadata: {} };
    }
    const cut = (t) => (t.length > 1 << 16 ? `${t.slice(0, 1 << 15)}\n[... ${size >> 10} KB in all ...]\n${t.slice(-(1 << 15))}` : t);
    return { ...message, value: cut(message.value || ""), traceback: cut(message.traceback || "") };
  }

  // --- results -----------------------------------------------------------------------------------

  const held = [];
  let current = null; // the run at work

  function publish(data, metadata, main) {
    if (current === null) {
      held.push({ data, metadata });
      if (held.length > HELD_RESULTS) held.shift();
      return;
    }
    if (current.silent) return;
    send({ ev: "result", id: current.id, main, data, metadata: metadata || {} });
  }

  const isPlain = (v) => Array.isArray(v) || (v !== null && typeof v === "object" && [Object.prototype, null].includes(Object.getPrototypeOf(v)));
  const isBytes = (v) => v instanceof Uint8Array || v instanceof ArrayBuffer;

  function bundle(value) {
    const own = value !== null && typeof value === "object" && value[Symbol.for("casemate.display")];
    if (typeof own === "function") return encode(own.call(value));
    const data = { "text/plain": util.inspect(value) };
    if (isPlain(value)) {
      try {
        const text = JSON.stringify(value);
        if (text !== undefined && text.length <= JSON_LIMIT) data["application/json"] = JSON.parse(text);
      } catch {
        // not for JSON: circular, or a BigInt in it
      }
    }
    return data;
  }

  function encode(data) {
    const out = {};
    for (const [mime, value] of Object.entries(data)) {
      out[mime] = isBytes(value) ? Buffer.from(value).toString("base64") : value;
    }
    return out;
  }

  /** display(value) shows a value; display({"text/html": "..."}) shows what it holds, by MIME type. */
  function display(value, metadata) {
    const keys = isPlain(value) && !Array.isArray(value) ? Object.keys(value) : [];
    const isBundle = keys.length > 0 && keys.every((key) => /^[a-z]+\/[\w.+-]+$/.test(key));
    publish(isBundle ? encode(value) : bundle(value), metadata, false);
  }

  // --- errors ------------------------------------------------------------------------------------

  class InterruptError extends Error {
    constructor() {
      super("the run was interrupted");
      this.shown = "InterruptError: the run was interrupted";
    }
  }
  InterruptError.prototype.name = "InterruptError";

  class ExitError extends Error {
    constructor(code) {
      super(`process.exit(${code === undefined ? "" : code})`);
      this.shown = `ExitError: ${this.message}\n(The run ended here. The context goes on: its variables are kept.)`;
    }
  }
  ExitError.prototype.name = "ExitError";

  /** Leave out frames of the driver and of Node's machinery. */
  function traceback(error) {
    let text;
    try {
      text = error instanceof InterruptError || error instanceof ExitError ? error.shown : util.inspect(error);
    } catch (e) {
      text = String(e);
    }
    const lines = text.split("\n");
    return lines.filter((line) => !/^\s+at .*(<casemate>|node:internal\/|node:vm:)/.test(line)).join("\n");
  }

  function describe(error) {
    if (util.types.isNativeError(error) || error instanceof Error) {
      return { name: String(error.name || "Error"), value: String(error.message), traceback: traceback(error) };
    }
    const text = util.inspect(error);
    return { name: "Error", value: text, traceback: `Uncaught ${text}` };
  }

  function complain(what, error) {
    process.stderr.write(`${what} ${describe(error).traceback}\n`);
  }

  // --- rewriting ---------------------------------------------------------------------------------

  let acorn = null;
  try {
    acorn = require("internal/deps/acorn/acorn/dist/acorn");
  } catch {
    // a Node.js without its parser: runs are plain scripts then
  }

  function parse(code) {
    for (const sourceType of ["module", "script"]) {
      try {
        return acorn.parse(code, { ecmaVersion: "latest", sourceType, allowAwaitOutsideFunction: true, allowHashBang: true });
      } catch {
        // V8 words the error better
      }
    }
    return null;
  }

  const isFunction = (node) => /Function/.test(node.type) || node.type === "StaticBlock";

  /** Call visit for every node; it returns false to go no deeper. */
  function walk(node, visit, parent) {
    if (visit(node, parent) === false) return;
    for (const key of Object.keys(node)) {
      const value = node[key];
      if (Array.isArray(value)) {
        for (const item of value) if (item && typeof item.type === "string") walk(item, visit, node);
      } else if (value && typeof value.type === "string") {
        walk(value, visit, node);
      }
    }
  }

  function namesOf(pattern, into = []) {
    switch (pattern && pattern.type) {
      case "Identifier":
        into.push(pattern.name);
        break;
      case "ObjectPattern":
        for (const p of pattern.properties) namesOf(p.type === "RestElement" ? p.argument : p.value, into);
        break;
      case "ArrayPattern":
        for (const p of pattern.elements) namesOf(p, into);
        break;
      case "AssignmentPattern":
        namesOf(pattern.left, into);
        break;
      case "RestElement":
        namesOf(pattern.argument, into);
        break;
    }
    return into;
  }

  /** Edits of a text by position, applied at once. */
  class Edits {
    list = [];
    replace(start, end, text) {
      this.list.push({ start, end, text, order: this.list.length });
    }
    insert(at, text) {
      this.replace(at, at, text);
    }
    /** Take a range out, but keep its lines. */
    blank(code, start, end) {
      this.replace(start, end, code.slice(start, end).replace(/[^\n]/g, " "));
    }
    apply(code) {
      let out = "";
      let at = 0;
      for (const e of this.list.sort((a, b) => a.start - b.start || a.order - b.order)) {
        out += code.slice(at, e.start) + e.text;
        at = Math.max(at, e.end);
      }
      return out + code.slice(at);
    }
  }

  /**
   * Rewrite a run into a script. Names that it declares at its top become properties of the global
   * object, so that later runs see them and may declare them again. A run that awaits or imports becomes
   * the body of an async function.
   */
  function rewrite(code) {
    const plain = { text: code, offset: 0, hasValue: true, names: [] };
    if (acorn === null) return plain;
    if (/^\s*\{/.test(code) && !/;\s*$/.test(code)) {
      const wrapped = parse(`(${code}\n)`); // {a: 1} is an object, as in Node's own prompt
      if (wrapped !== null && wrapped.body.length === 1) {
        const inner = rewriteTree(`(${code}\n)`, wrapped);
        return { ...inner, offset: inner.offset + 1 };
      }
    }
    const tree = parse(code);
    return tree === null ? plain : rewriteTree(code, tree);
  }

  function rewriteTree(code, tree) {
    const edits = new Edits();
    let isAsync = false;
    walk(tree, (node) => {
      if (isFunction(node)) return false;
      if (node.type === "AwaitExpression" || (node.type === "ForOfStatement" && node.await) || node.type === "ImportDeclaration") isAsync = true;
      return true;
    });
    walk(tree, (node) => {
      if (node.type === "MetaProperty" && node.meta.name === "import") {
        edits.replace(node.start, node.end, 'globalThis[Symbol.for("casemate.meta")]');
      } else if (node.type === "ImportExpression" && !defaultLoader) {
        edits.replace(node.start, node.start + "import".length, 'globalThis[Symbol.for("casemate.import")]');
      }
      return true;
    });
    const state = { code, edits, isAsync, names: [], before: [] };
    for (const node of tree.body) rewriteTop(state, node);
    if (isAsync) rewriteNestedVars(state, tree);
    const last = tree.body[tree.body.length - 1];
    const hasValue = last !== undefined && last.type === "ExpressionStatement";
    let prefix = "";
    let suffix = "";
    if (isAsync) {
      if (hasValue) {
        edits.insert(last.start, "return (");
        edits.insert(last.expression.end, ")");
      }
      const names = [...new Set(state.names)];
      prefix = `${names.length ? `var ${names.join(", ")}; ` : ""}(async () => { ${state.before.join("")}`;
      suffix = "\n})()";
    }
    return { text: prefix + edits.apply(code) + suffix, offset: prefix.length, hasValue, isAsync, names: state.names };
  }

  /** Rewrite one statement at the top of a run. */
  function rewriteTop(state, node) {
    const { code, edits, isAsync } = state;
    switch (node.type) {
      case "VariableDeclaration":
        for (const d of node.declarations) namesOf(d.id, state.names);
        if (isAsync) assign(state, node, false);
        else if (node.kind !== "var") edits.replace(node.start, node.start + node.kind.length, "var".padEnd(node.kind.length));
        break;
      case "ClassDeclaration":
        state.names.push(node.id.name);
        edits.insert(node.start, `${isAsync ? "" : "var "}${node.id.name} = `);
        edits.insert(node.end, ";");
        break;
      case "FunctionDeclaration":
        state.names.push(node.id.name);
        if (isAsync) state.before.push(`globalThis.${node.id.name} = ${node.id.name}; `);
        break;
      case "ImportDeclaration":
        state.before.push(importOf(state, node));
        edits.blank(code, node.start, node.end);
        break;
      case "ExportNamedDeclaration":
        if (node.declaration) {
          edits.blank(code, node.start, node.declaration.start);
          rewriteTop(state, node.declaration);
        } else if (!node.source) {
          edits.blank(code, node.start, node.end);
        }
        break;
      case "ExportDefaultDeclaration":
        edits.blank(code, node.start, node.declaration.start);
        if (node.declaration.id) rewriteTop(state, node.declaration);
        break;
    }
  }

  /** Turn a declaration into assignments; its names are declared outside. */
  function assign(state, node, isInFor) {
    const { edits } = state;
    const first = node.declarations[0];
    if (isInFor) {
      edits.blank(state.code, node.start, first.start);
      return;
    }
    edits.replace(node.start, first.start, "void (");
    for (const d of node.declarations) {
      if (!d.init) edits.insert(d.id.end, node.kind === "var" ? ` = ${d.id.name}` : " = undefined");
    }
    edits.insert(node.declarations[node.declarations.length - 1].end, ");");
  }

  /** A var deep in blocks belongs to the whole run, also where the run is a function. */
  function rewriteNestedVars(state, tree) {
    walk(tree, (node, parent) => {
      if (isFunction(node)) return false;
      if (node.type !== "VariableDeclaration" || node.kind !== "var" || parent === tree || /^Export/.test(parent.type)) return true;
      for (const d of node.declarations) namesOf(d.id, state.names);
      assign(state, node, /^For/.test(parent.type));
      return true;
    });
  }

  function importOf(state, node) {
    const source = JSON.stringify(node.source.value);
    const attributes = node.attributes && node.attributes.length ? `, ${importAttributes(state.code, node)}` : "";
    const loaded = `await ${defaultLoader ? "import" : 'globalThis[Symbol.for("casemate.import")]'}(${source}${attributes})`;
    if (node.specifiers.length === 0) return `${loaded}; `;
    const parts = [];
    let out = "";
    for (const s of node.specifiers) {
      state.names.push(s.local.name);
      if (s.type === "ImportNamespaceSpecifier") {
        out += `${s.local.name} = ${loaded}; `;
      } else {
        const imported = s.type === "ImportDefaultSpecifier" ? "default" : s.imported.name || s.imported.value;
        parts.push([imported, s.local.name]);
      }
    }
    if (parts.length) {
      const list = parts.map(([from]) => JSON.stringify(from)).join(", ");
      const targets = parts.map(([, to]) => to).join(", ");
      out += `[${targets}] = globalThis[Symbol.for("casemate.pick")](${loaded}, ${source}, ${list}); `;
    }
    return out;
  }

  function importAttributes(code, node) {
    const inner = node.attributes.map((a) => `${JSON.stringify(a.key.name || a.key.value)}: ${JSON.stringify(a.value.value)}`);
    return `{ with: { ${inner.join(", ")} } }`;
  }

  /** Return a module's exports by name. A missing one is the error that a real import would be. */
  function pick(namespace, source, ...names) {
    return names.map((name) => {
      if (!(name in namespace) && !isTypeScript) {
        throw new SyntaxError(`The requested module '${source}' does not provide an export named '${name}'`);
      }
      return namespace[name];
    });
  }

  // --- TypeScript --------------------------------------------------------------------------------

  const isTypeScript = language === "typescript";
  let stripper = null;

  /** Take types away; whoever does it must keep lines where they are, as far as it can. */
  function stripTypes(code) {
    if (stripper === null) stripper = findStripper();
    return stripper(code);
  }

  function findStripper() {
    if (typeof nodeModule.stripTypeScriptTypes === "function") {
      return (code) => {
        const emit = process.emitWarning; // an experimental feature announces itself once
        process.emitWarning = () => {};
        try {
          return nodeModule.stripTypeScriptTypes(code, { mode: "strip" });
        } catch (e) {
          if (e.code !== "ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX") throw e;
          return nodeModule.stripTypeScriptTypes(code, { mode: "transform" }); // enum and namespace
        } finally {
          process.emitWarning = emit;
        }
      };
    }
    const find = createRequire(path.join(process.cwd(), "cell.js"));
    const load = (name) => {
      for (const place of [name, `/usr/local/lib/node_modules/${name}`, `/usr/share/nodejs/${name}`, `/usr/lib/node_modules/${name}`]) {
        try {
          return find(place);
        } catch (e) {
          if (e.code !== "MODULE_NOT_FOUND") throw e;
        }
      }
      return null;
    };
    const sucrase = load("sucrase");
    if (sucrase) {
      const options = { transforms: ["typescript"], disableESTransforms: true, keepUnusedImports: true, preserveDynamicImport: true };
      return (code) => sucrase.transform(code, options).code;
    }
    const ts = load("typescript");
    if (ts) {
      const options = { target: ts.ScriptTarget.ESNext, module: ts.ModuleKind.ESNext, isolatedModules: true };
      Object.assign(options, "5" <= ts.version ? { verbatimModuleSyntax: true } : { preserveValueImports: true });
      return (code) => {
        const out = ts.transpileModule(code, { compilerOptions: options, reportDiagnostics: true });
        const bad = out.diagnostics.find((d) => d.category === ts.DiagnosticCategory.Error);
        if (bad) throw new SyntaxError(ts.flattenDiagnosticMessageText(bad.messageText, "\n"));
        return out.outputText;
      };
    }
    throw new Error(
      `this Node.js (${process.version}) can't take TypeScript's types away: use Node.js 22.13 or later, or install the package sucrase or typescript`,
    );
  }

  // --- running code ------------------------------------------------------------------------------

  const defaultLoader = vm.constants && vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER;

  /** import() for a Node.js whose scripts can't be given the default loader. */
  function importFromCwd(specifier) {
    let target = String(specifier);
    if (/^\.{0,2}\//.test(target)) {
      target = new URL(target, pathToFileURL(process.cwd() + "/")).href;
    } else if (!/^(node|file|data|https?):/.test(target) && !Module.builtinModules.includes(target.split("/")[0])) {
      try {
        target = pathToFileURL(createRequire(path.join(process.cwd(), "cell.js")).resolve(target)).href;
      } catch {
        // a package that only has exports for import: from where the context started
      }
    }
    return plainImport(target);
  }
  // The text that starts the driver is a script with a loader of its own.
  const plainImport = globalThis[Symbol.for("casemate.start.import")];
  delete globalThis[Symbol.for("casemate.start.import")];

  function compile(code, name) {
    const js = isTypeScript ? stripTypes(code) : code;
    const plan = rewrite(js);
    for (const variable of plan.names) freeName(variable);
    const options = { filename: name, columnOffset: -plan.offset };
    if (defaultLoader) options.importModuleDynamically = defaultLoader;
    return { ...plan, script: new vm.Script(plan.text, options) };
  }

  /** Some globals of Node's can't be assigned to; a run that declares such a name gets its own. */
  function freeName(name) {
    const found = Object.getOwnPropertyDescriptor(globalThis, name);
    if (found && found.configurable && (found.get || found.set || !found.writable)) {
      Object.defineProperty(globalThis, name, { value: undefined, writable: true, configurable: true, enumerable: false });
    }
  }

  const guardScript = new vm.Script('globalThis[Symbol.for("casemate.guarded")]()', { filename: "<casemate>" });

  /** Call a function that runs code of the user's, so that an interrupt ends it. */
  function guarded(step) {
    globalThis[guardedKey] = step;
    try {
      return guardScript.runInThisContext({ breakOnSigint: true, displayErrors: false });
    } catch (e) {
      throw interruptedOr(e);
    } finally {
      globalThis[guardedKey] = undefined;
    }
  }

  /** Tell an interrupt from an error. It cut Node's own bookkeeping short, too. */
  function interruptedOr(error) {
    if (!error || error.code !== "ERR_SCRIPT_EXECUTION_INTERRUPTED") return error;
    clearAsyncStack();
    return new InterruptError();
  }

  function clearAsyncStack() {
    try {
      require("internal/async_hooks").clearAsyncIdStack();
    } catch {
      // a Node.js that keeps it elsewhere
    }
  }

  const guardedKey = Symbol.for("casemate.guarded");
  for (const [name, value] of [
    ["guarded", undefined],
    ["import", importFromCwd],
    ["pick", pick],
    ["meta", undefined],
  ]) {
    Object.defineProperty(globalThis, Symbol.for("casemate." + name), { value, writable: true, configurable: true, enumerable: false });
  }

  let count = 0;
  let lastDir = "";

  /** Let require and __dirname follow the working directory. */
  function prepareScope() {
    const dir = process.cwd();
    if (dir === lastDir) return;
    lastDir = dir;
    const file = path.join(dir, "cell.js");
    define("require", createRequire(file));
    define("__filename", file);
    define("__dirname", dir);
    const url = pathToFileURL(file).href;
    globalThis[Symbol.for("casemate.meta")] = { url, filename: file, dirname: dir, resolve: (name) => new URL(name, url).href };
  }

  const defined = new Map(); // what the driver put there, to see whether code put something else
  function define(name, value) {
    const found = Object.getOwnPropertyDescriptor(globalThis, name);
    if (defined.has(name) && (!found || found.value !== defined.get(name))) return;
    defined.set(name, value);
    Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });
  }

  function setEnv(env) {
    const before = Object.entries(env).map(([name]) => [name, process.env[name]]);
    Object.assign(process.env, env);
    return before;
  }

  function undoEnv(before) {
    for (const [name, value] of before) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
  }

  async function handleRun(message) {
    const run = { id: message.id, silent: Boolean(message.silent), env: [], ended: false };
    run.interrupted = new Promise((_, reject) => {
      run.interrupt = () => reject(new InterruptError());
    });
    run.interrupted.catch(() => {});
    if (!run.silent) count++;
    current = run;
    for (const h of held.splice(0)) publish(h.data, h.metadata, false);
    run.env = setEnv(message.env || {});
    try {
      prepareScope();
      const cell = compile(message.code, `Cell[${count}]`);
      let value;
      try {
        value = cell.script.runInThisContext({ breakOnSigint: true });
      } catch (e) {
        throw interruptedOr(e);
      }
      if (cell.isAsync) value = await Promise.race([value, run.interrupted]);
      else await Promise.race([nothing, run.interrupted]); // reactions of what the run resolved come first
      if (run.ended) return;
      if (cell.hasValue && value !== undefined) {
        const data = guarded(() => bundle(value));
        remember(value);
        publish(data, undefined, true);
      }
      finish(run);
    } catch (e) {
      if (!run.ended) finish(run, e);
    }
  }
  const nothing = Promise.resolve();

  let remembered; // what _ holds, unless code took that name
  function remember(value) {
    if (globalThis._ === remembered) globalThis._ = remembered = value;
  }

  /** End a run; rest is the error that it ended with. */
  function finish(run, ...rest) {
    if (run.ended) return;
    run.ended = true;
    if (rest.length) {
      let error;
      try {
        error = guarded(() => describe(rest[0]));
      } catch (e) {
        error = { name: "Error", value: "", traceback: `an error whose text could not be made (${e && e.name})` };
      }
      send({ ev: "error", id: run.id, ...error });
    }
    undoEnv(run.env);
    current = null;
    send({ ev: "end", id: run.id, count });
    next();
  }

  // --- interrupts --------------------------------------------------------------------------------

  // JavaScript sees a signal only when it is idle. So a second thread waits for SIGINT in a way that the signal
  // breaks, asks the main thread to end the run, and terminates what it executes if it does not answer.
  const watcherCode = `
    const { workerData: answers, parentPort } = require("worker_threads");
    const vm = require("vm");
    let session = null;
    try {
      const inspector = require("inspector");
      session = new inspector.Session();
      session.connectToMainThread();
    } catch {
      session = null;
    }
    globalThis.waiting = new Int32Array(new SharedArrayBuffer(4));
    globalThis.wait = { ms: Infinity };
    const inner = new vm.Script("Atomics.wait(waiting, 0, 0, wait.ms)");
    let seen;
    globalThis.watch = () => {
      for (;;) {
        let woken;
        try {
          woken = inner.runInThisContext({ breakOnSigint: true });
        } catch {
          seen = Atomics.load(answers, 0);
          wait.ms = 100;
          parentPort.postMessage("interrupt");
          continue;
        }
        wait.ms = Infinity;
        if (woken === "timed-out" && seen === Atomics.load(answers, 0) && session) {
          session.post("Runtime.terminateExecution");
          parentPort.postMessage("terminated");
        }
      }
    };
    // A signal that comes between two waits must find somebody, or it ends the process: so there are
    // two watches, one within the other.
    const outer = new vm.Script("watch()");
    parentPort.postMessage("ready");
    for (;;) {
      try {
        outer.runInThisContext({ breakOnSigint: true });
      } catch {
        // a signal between two waits, on the heels of another: that one does
      }
    }`;

  function startWatcher() {
    const answers = new Int32Array(new SharedArrayBuffer(4));
    const watcher = new Worker(watcherCode, { eval: true, workerData: answers, stdin: false, env: {}, execArgv: [] });
    watcher.unref();
    watcher.on("message", (what) => {
      Atomics.add(answers, 0, 1);
      Atomics.notify(answers, 0);
      if (what === "ready") {
        hello();
      } else if (current !== null) {
        const run = current;
        run.interrupt();
        // What was terminated never comes back to its await.
        if (what === "terminated") setImmediate(() => finish(run, new InterruptError()));
      }
    });
    watcher.on("error", (e) => complain("interrupts don't work:", e));
  }

  // --- start -------------------------------------------------------------------------------------

  const queue = [];
  function next() {
    if (current === null && queue.length > 0) setImmediate(() => current === null && queue.length > 0 && handleRun(queue.shift()));
  }

  function hello() {
    send({ ev: "ready", language, version: process.versions.node, pid: process.pid });
  }

  function listen() {
    const socket = new net.Socket({ fd: CONTROL, readable: true, writable: false });
    let parts = [];
    socket.on("data", (chunk) => {
      let at = 0;
      for (let end; (end = chunk.indexOf(10, at)) >= 0; at = end + 1) {
        parts.push(chunk.subarray(at, end));
        const message = JSON.parse(Buffer.concat(parts).toString("utf8"));
        parts = [];
        if (message.op === "run") queue.push(message);
      }
      parts.push(chunk.subarray(at));
      next();
    });
    socket.on("end", () => realExit(0));
    socket.on("error", () => realExit(0));
  }

  const emitWarning = process.emitWarning;
  process.emitWarning = function (warning, ...rest) {
    // The driver's own use of something experimental is no news for the code.
    if (String(warning).includes("USE_MAIN_CONTEXT_DEFAULT_LOADER")) return;
    Reflect.apply(emitWarning, process, [warning, ...rest]);
  };
  // A listener for SIGINT would take the signal away from the watcher.
  const starters = process.rawListeners("newListener");
  process.removeAllListeners("newListener");
  process.on("newListener", (type, ...rest) => {
    if (type !== "SIGINT") for (const start of starters) Reflect.apply(start, process, [type, ...rest]);
  });
  process.on("uncaughtException", (e) => complain("Uncaught", e));
  process.on("unhandledRejection", (e) => complain("Uncaught (in promise)", e));
  process.exit = (code) => {
    throw new ExitError(code);
  };
  for (const [name, fd] of [
    ["stdout", 1],
    ["stderr", 2],
  ]) {
    const output = new Output(fd);
    Object.defineProperty(process, name, { get: () => output, configurable: true, enumerable: true });
  }
  process.argv.length = 1;
  process.execArgv.length = 0;
  define("display", display);
  define("module", { exports: {} });
  define("exports", globalThis.module.exports);
  prepareScope();
  if (!inspectorAvailable) complain("a busy loop after an await can't be interrupted:", new Error("this Node.js has no inspector"));
  listen();
  startWatcher();
};
