// What E2B's SDK for JavaScript sees under load: big files without growth of the server, many commands at once, and
// how long things take beside bubblewrap doing the same work on this machine at the same time.
import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { after, before, describe, test } from 'node:test'

const { Sandbox } = await import(process.env.E2B_MODULE)

const timed = async (f) => {
  const began = performance.now()
  await f()
  return performance.now() - began
}
const median = (times) => times.toSorted((a, b) => a - b)[times.length >> 1]
const ms = (n) => `${n.toFixed(1)} ms`

// bubblewrap runs what the SDK runs for a command, in namespaces of its own, on the /usr that template host has.
function bubblewrap() {
  const args = ['--ro-bind', '/usr', '/usr', '--symlink', 'usr/bin', '/bin', '--symlink', 'usr/lib', '/lib', '--symlink', 'usr/lib64', '/lib64',
    '--proc', '/proc', '--dev', '/dev', '--unshare-all', '/bin/bash', '-l', '-c', 'true']
  const r = spawnSync('bwrap', args)
  assert.equal(r.status, 0, `bubblewrap is needed to compare with (deploy/setup.sh --tests): ${r.error ?? r.stderr}`)
}

// resident is the memory of the server, in MB.
function resident() {
  const status = readFileSync(`/proc/${process.env.CASEMATE_PID}/status`, 'utf8')
  return Number(/^VmRSS:\s+(\d+) kB$/m.exec(status)[1]) / 1024
}

describe('load', () => {
  let box
  before(async () => (box = await Sandbox.create('host', { timeoutMs: 600_000 })))
  after(() => box?.kill())

  test('200 MB up and down in a stream, with flat memory of the server', async (t) => {
    const piece = new Uint8Array(1 << 20).map((_, i) => i * 31)
    const pieces = 200
    let left = pieces
    const stream = new ReadableStream({
      pull(c) {
        if (left-- > 0) c.enqueue(piece)
        else c.close()
      },
    })
    const rest = resident()
    let most = rest
    const watch = setInterval(() => (most = Math.max(most, resident())), 20)
    try {
      const up = await timed(() => box.files.write('big', stream, { useOctetStream: true, requestTimeoutMs: 0 }))
      let got = 0
      const down = await timed(async () => {
        for await (const part of await box.files.read('big', { format: 'stream', requestTimeoutMs: 0 })) got += part.length
      })
      assert.equal(got, pieces * piece.length)
      t.diagnostic(`up ${ms(up)}, down ${ms(down)}, server ${rest.toFixed(0)} MB, at most ${most.toFixed(0)} MB`)
    } finally {
      clearInterval(watch)
    }
    assert.ok(most - rest < 40, `the server grew from ${rest} to ${most} MB`)
    const sum = await box.commands.run('stat -c %s big; rm big')
    assert.equal(sum.stdout, `${pieces * piece.length}\n`)
  })

  test('500 commands at once, while others are served', async (t) => {
    const alone = []
    for (let i = 0; i < 20; i++) alone.push(await timed(() => box.commands.run('echo alone')))
    const looks = []
    let busy = true
    const looking = (async () => {
      while (busy) looks.push(await timed(() => box.getInfo()))
    })()
    let all
    const took = await timed(async () => {
      all = await Promise.all(Array.from({ length: 500 }, (_, i) => box.commands.run(`echo ${i}`, { timeoutMs: 0, requestTimeoutMs: 0 })))
    })
    busy = false
    await looking
    assert.deepEqual(all.map((r) => r.stdout), Array.from({ length: 500 }, (_, i) => `${i}\n`))
    t.diagnostic(`${ms(took)} for 500, ${ms(median(alone))} for one alone; a look meanwhile ${ms(median(looks))}, at most ${ms(Math.max(...looks))}`)
    assert.ok(took < 2 * 500 * median(alone), `500 at once took ${ms(took)}; one alone takes ${ms(median(alone))}`)
  })

  test('20 creates at once take no longer than 20 in a row', async (t) => {
    const boxes = []
    const create = async () => boxes.push(await Sandbox.create('host'))
    await create()
    const row = await timed(async () => {
      for (let i = 0; i < 20; i++) await create()
    })
    const once = await timed(() => Promise.all(Array.from({ length: 20 }, create)))
    await Promise.all(boxes.map((b) => b.kill()))
    t.diagnostic(`in a row ${ms(row)}, at once ${ms(once)}`)
    assert.ok(once < 1.5 * row, `at once ${ms(once)}, in a row ${ms(row)}`)
  })

  test('create to first output, and a command, beside bubblewrap', async (t) => {
    const made = []
    const ran = []
    const peer = []
    for (let i = 0; i < 21; i++) {
      let fresh
      made.push(await timed(async () => {
        fresh = await Sandbox.create('host')
        assert.equal((await fresh.commands.run('echo first')).stdout, 'first\n')
      }))
      await fresh.kill()
      ran.push(await timed(() => box.commands.run('true')))
      peer.push(await timed(bubblewrap))
    }
    const figures = `create to first output ${ms(median(made))}, command true ${ms(median(ran))}, bubblewrap ${ms(median(peer))} (medians)`
    t.diagnostic(figures)
    assert.ok(median(ran) <= median(peer) + 6, figures)
    // 60 ms on a machine that has nothing else to do; on a busy one, what bubblewrap takes tells how busy it is.
    assert.ok(median(made) <= Math.max(60, 4 * median(peer)), figures)
  })
})
