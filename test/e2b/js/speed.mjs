// Measures what E2B's SDK gets from a server, and prints a table. Times are of this machine at this moment:
// the comparison with bubblewrap, which is started the same way in the same run, says more.
import { spawn } from 'node:child_process'
import { readFileSync } from 'node:fs'
import { performance } from 'node:perf_hooks'
import { Readable } from 'node:stream'

const { Sandbox } = await import(process.env.E2B_MODULE)
const serverPid = Number(process.env.SERVER_PID)

async function times(n, f) {
  const all = []
  for (let i = 0; i < n; i++) {
    const begin = performance.now()
    await f(i)
    all.push(performance.now() - begin)
  }
  all.sort((a, b) => a - b)
  const at = (q) => all[Math.min(n - 1, Math.floor(q * n))]
  return { n, p50: at(0.5), p95: at(0.95), max: all[n - 1] }
}

const row = (what, t, note = '') =>
  console.log(`${what.padEnd(52)} p50 ${t.p50.toFixed(1).padStart(7)} ms  p95 ${t.p95.toFixed(1).padStart(7)}  n ${String(t.n).padStart(4)}  ${note}`)

/** Resident memory of the server in MiB. */
const memory = () => Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${serverPid}/status`, 'utf8'))[1]) / 1024

const bwrap = () =>
  new Promise((resolve, reject) => {
    const args = ['--ro-bind', '/', '/', '--proc', '/proc', '--dev', '/dev', '--tmpfs', '/tmp', '--unshare-all', 'bash', '-l', '-c', 'true']
    spawn('bwrap', args, { stdio: 'ignore' }).on('error', reject).on('exit', (code) => (code === 0 ? resolve() : reject(new Error(`bwrap: ${code}`))))
  })

await (await Sandbox.create()).kill() // the first one makes connections
row('create to the first echo', await times(30, async () => {
  const box = await Sandbox.create()
  await box.commands.run('echo hi')
  await box.kill()
}), '(with kill)')

const boxes = []
row('create to the first echo, without kill', await times(30, async () => {
  const box = await Sandbox.create()
  await box.commands.run('echo hi')
  boxes.push(box)
}))
await Promise.all(boxes.map((b) => b.kill()))

const box = await Sandbox.create({ timeoutMs: 600_000 })
await box.commands.run('true')
const run = await times(200, () => box.commands.run('true'))
const peer = await times(50, bwrap)
row("commands.run('true')", run)
row('  bubblewrap: bash -l -c true', peer, `difference ${(run.p50 - peer.p50).toFixed(1)} ms`)

{
  const begin = performance.now()
  const all = await Promise.all(Array.from({ length: 500 }, (_, i) => box.commands.run(`echo ${i}`)))
  const right = all.every((r, i) => r.stdout === `${i}\n`)
  console.log(`${'500 commands at once'.padEnd(52)} ${(performance.now() - begin).toFixed(0).padStart(11)} ms  ${right ? 'all right' : 'WRONG'}`)
}
{
  const begin = performance.now()
  const many = await Promise.all(Array.from({ length: 20 }, async () => {
    const b = await Sandbox.create()
    await b.commands.run('echo hi')
    return b
  }))
  console.log(`${'20 creates at once, each to its first echo'.padEnd(52)} ${(performance.now() - begin).toFixed(0).padStart(11)} ms`)
  await Promise.all(many.map((b) => b.kill()))
}
{
  const size = 200 << 20
  const block = Buffer.alloc(1 << 20, 'x')
  const source = Readable.from((function* () { for (let i = 0; i < size / block.length; i++) yield block })())
  const before = memory()
  let peak = before
  const watch = setInterval(() => (peak = Math.max(peak, memory())), 20)
  let begin = performance.now()
  await box.files.write('/home/user/big', Readable.toWeb(source), { useOctetStream: true, requestTimeoutMs: 300_000 })
  const up = performance.now() - begin
  begin = performance.now()
  let got = 0
  for await (const chunk of await box.files.read('/home/user/big', { format: 'stream', requestTimeoutMs: 300_000 })) got += chunk.length
  const down = performance.now() - begin
  clearInterval(watch)
  if (got !== size) throw new Error(`${got} of ${size} bytes came back`)
  console.log(`${'200 MB up, and down, in a stream'.padEnd(52)} ${up.toFixed(0)} ms, ${down.toFixed(0)} ms; server memory ${before.toFixed(0)} to at most ${peak.toFixed(0)} MiB`)
}
await box.kill()
