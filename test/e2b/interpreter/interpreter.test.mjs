// Scenarios with E2B's code interpreter SDK for JavaScript as its users write them.
import assert from 'node:assert/strict'
import { after, before, describe, test } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'

const { Sandbox } = await import(process.env.E2B_MODULE)

describe('code interpreter', () => {
  let box
  before(async () => (box = await Sandbox.create({ timeoutMs: 600_000, envs: { GLOBAL: 'g' } })))
  after(() => box.kill())

  test('variables last, and the last expression shows', async () => {
    await box.runCode('x = 1')
    const r = await box.runCode('x += 1; x')
    assert.equal(r.text, '2')
    assert.equal(r.results[0].isMainResult, true)
    assert.deepEqual(r.logs, { stdout: [], stderr: [] })
    assert.equal((await box.runCode('1+1')).executionCount, 3)
  })

  test('output streams in order', async () => {
    const seen = []
    const note = (m) => seen.push([m.error, m.line])
    const r = await box.runCode('import sys\nprint("a")\nprint("b", file=sys.stderr)\nprint("c")', { onStdout: note, onStderr: note })
    assert.equal(r.logs.stdout.join(''), 'a\nc\n')
    assert.deepEqual(r.logs.stderr, ['b\n'])
    assert.equal(seen.some(([error, line]) => error && line === 'b\n'), true)
  })

  test('errors have a name, a value and a traceback', async () => {
    const errors = []
    const r = await box.runCode('1/0', { onError: (e) => errors.push(e) })
    assert.equal(r.error.name, 'ZeroDivisionError')
    assert.equal(r.error.value, 'division by zero')
    assert.match(r.error.traceback, /1\/0/)
    assert.equal(errors.length, 1)
  })

  test('variables of the environment: of the sandbox, and of one run', async () => {
    const code = 'import os; os.environ.get("GLOBAL"), os.environ.get("MINE")'
    assert.equal((await box.runCode(code, { envs: { MINE: 'm' } })).text, "('g', 'm')")
    assert.equal((await box.runCode(code)).text, "('g', None)")
  })

  test('contexts keep apart, and start anew', async () => {
    const c = await box.createCodeContext({ cwd: '/tmp' })
    assert.equal(c.cwd, '/tmp')
    await box.runCode('y = 5', { context: c })
    assert.equal((await box.runCode('y', { context: c })).text, '5')
    assert.equal((await box.runCode('import os; os.getcwd()', { context: c })).text, '/tmp')
    assert.equal((await box.runCode('y')).error.name, 'NameError')
    assert.equal((await box.listCodeContexts()).at(-1).id, c.id)
    await box.restartCodeContext(c)
    assert.equal((await box.runCode('y', { context: c })).error.name, 'NameError')
    await box.removeCodeContext(c)
    assert.equal((await box.listCodeContexts()).some((o) => o.id === c.id), false)
    await assert.rejects(box.runCode('1', { context: c }), /not found/)
  })

  test('4 MB of characters of any width, in odd pieces', async () => {
    const n = Math.floor((4 << 20) / 9)
    const r = await box.runCode(`
import os
b = ('é漢😀' * ${n}).encode()
for i in range(0, len(b), 4093): os.write(1, b[i:i+4093])
'done'`)
    assert.equal(r.text, 'done')
    assert.equal(r.logs.stdout.join('') === 'é漢😀'.repeat(n), true)
  })

  test('who gives up interrupts the code, and variables last', async () => {
    await box.runCode('kept = 1')
    await assert.rejects(box.runCode('while True: pass', { timeoutMs: 1000 }))
    await sleep(200)
    assert.equal((await box.runCode('kept', { timeoutMs: 600_000 })).text, '1')
  })

  test('an interpreter that dies takes nothing along', async () => {
    const r = await box.runCode('import ctypes; ctypes.string_at(0)')
    assert.equal(r.error.name, 'InterpreterEnded')
    assert.equal((await box.commands.run('echo alive')).stdout, 'alive\n')
    assert.equal((await box.runCode('1+1')).text, '2')
  })

  test('a connection made anew finds the variables', async () => {
    await box.runCode('z = 9')
    const again = await Sandbox.connect(box.sandboxId)
    assert.equal((await again.runCode('z')).text, '9')
  })
})

test('a sandbox that is killed says so', async () => {
  const box = await Sandbox.create({ timeoutMs: 600_000 })
  let begun
  const begins = new Promise((resolve) => (begun = resolve))
  const run = assert.rejects(box.runCode('import time; print("begun", flush=True); time.sleep(300)', { onStdout: begun }), /sandbox was killed/)
  await begins
  await box.kill()
  await run
})

test('a sandbox that is not public is reached with its token', async () => {
  const box = await Sandbox.create({ timeoutMs: 600_000, network: { allowPublicTraffic: false } })
  try {
    assert.equal((await box.runCode('x = 1; x')).text, '1')
    assert.equal((await box.listCodeContexts())[0].language, 'python')
  } finally {
    await box.kill()
  }
})

describe('the code interpreter as the sandbox reaches it', () => {
  let box
  before(async () => (box = await Sandbox.create({ timeoutMs: 600_000 })))
  after(() => box.kill())
  const ask = (path, body, headers = {}) =>
    box.commands.run(`python3 - <<'END'
import json, time, urllib.error, urllib.request
body = ${JSON.stringify(JSON.stringify(body ?? null))}
for _ in range(300):
    try:
        request = urllib.request.Request("http://0.0.0.0:49999${path}", None if body == "null" else body.encode(), json.loads('${JSON.stringify(headers)}'))
        with urllib.request.urlopen(request) as answer:
            print(answer.status, answer.read().decode())
        break
    except urllib.error.HTTPError as e:
        print(e.code, e.read().decode())
        break
    except OSError:
        time.sleep(0.1)  # it comes up with the sandbox, not before it
END`)

  test('port 49999 of the loopback device answers', async () => {
    assert.match((await ask('/health')).stdout, /^200 "OK"/)
  })

  test('and runs code in the contexts that the SDK has', async () => {
    await box.runCode('x = 20')
    assert.match((await ask('/execute', { code: 'x + 1' })).stdout, /^200 [^]*"text":"21"/)
  })

  test('but not for pages', async () => {
    assert.match((await ask('/execute', { code: '1' }, { Origin: 'http://example.com' })).stdout, /^403 /)
  })

  test('and nothing inside can end it', async () => {
    await box.commands.run("kill -9 -1", { timeoutMs: 30_000 }).catch(() => {})
    assert.match((await ask('/health')).stdout, /^200 "OK"/)
    assert.equal((await box.runCode('1 + 1')).text, '2')
  })
})
