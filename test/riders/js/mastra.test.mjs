// Mastra's E2B provider, and Mastra's workspace tools on top of it.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Workspace, WORKSPACE_TOOLS, createWorkspaceTools } from '@mastra/core/workspace'
import { E2BSandbox } from '@mastra/e2b'

// Without a template, Mastra builds one of its own with FUSE programs for mounts of cloud storage.
const options = { template: 'base', timeout: 600_000 }

test('Mastra: commands, processes, files, stop and start again, destroy', async () => {
  const id = `task-${Date.now()}`
  let sandbox = new E2BSandbox({ ...options, id, env: { GREETING: 'hello' } })
  await sandbox._start()
  try {
    const seen = []
    const result = await sandbox.executeCommand('sh', ['-c', 'echo "$GREETING $1"; echo oops >&2', 'sh', 'a b'], {
      cwd: '/tmp',
      onStdout: (text) => seen.push(text),
    })
    assert.equal(result.stdout, 'hello a b\n')
    assert.equal(result.stderr, 'oops\n')
    assert.equal(result.exitCode, 0)
    assert.equal(seen.join(''), 'hello a b\n')

    const failed = await sandbox.executeCommand('sh', ['-c', 'exit 4'])
    assert.equal(failed.exitCode, 4)
    assert.equal(failed.success, false)

    const started = Date.now()
    const late = await sandbox.executeCommand('sleep', ['60'], { timeout: 500 })
    assert.equal(late.success, false)
    assert.ok(Date.now() - started < 20_000, 'a timeout ends the command')

    await sandbox.writeFiles([{ path: '/tmp/task/a.txt', content: 'one\n' }, { path: '/tmp/task/b.bin', content: Buffer.from([0, 255, 10]) }])
    assert.equal((await sandbox.executeCommand('sh', ['-c', 'cat /tmp/task/a.txt; wc -c < /tmp/task/b.bin'])).stdout, 'one\n3\n')

    // A process in the background: its input, its output, its life over a pause, its end.
    const cat = await sandbox.processes.spawn('while read -r line; do echo "got $line"; done')
    await cat.sendStdin('first\n')
    await until(() => cat.stdout.includes('got first\n'))
    assert.ok((await sandbox.processes.list()).some((p) => p.pid === cat.pid && p.running))

    await sandbox._stop()
    sandbox = new E2BSandbox({ ...options, id }) // as another program would find it
    await sandbox._start()
    assert.equal((await sandbox.executeCommand('cat', ['/tmp/task/a.txt'])).stdout, 'one\n')
    const found = await sandbox.processes.get(cat.pid)
    await found.sendStdin('second\n')
    await until(() => found.stdout.includes('got second\n'))
    assert.equal(await found.kill(), true)
    assert.notEqual((await found.wait()).exitCode, 0)
  } finally {
    await sandbox._destroy()
  }
})

test('Mastra: a workspace gives an agent its tools', async () => {
  const workspace = new Workspace({ sandbox: new E2BSandbox({ ...options, id: `tools-${Date.now()}` }) })
  await workspace.init()
  try {
    const tools = await createWorkspaceTools(workspace)
    const run = tools[WORKSPACE_TOOLS.SANDBOX.EXECUTE_COMMAND]
    const text = await run.execute({ command: 'python3 -c "print(6*7)"' }, { workspace })
    assert.match(String(text), /42/)
  } finally {
    await workspace.destroy()
  }
})

async function until(condition) {
  const deadline = Date.now() + 120_000
  while (!condition()) {
    assert.ok(Date.now() < deadline, 'it never came')
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
}
