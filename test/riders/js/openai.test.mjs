// The E2B client of OpenAI's Agents SDK: its sandbox session, and an agent whose model is a script.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Manifest, file } from '@openai/agents/sandbox'
import { E2BSandboxClient } from '@openai/agents-extensions/sandbox/e2b'

// A root below the user's home: at the default, /workspace, only a template with sudo may make one.
const manifest = () => new Manifest({ root: '/home/user/workspace', entries: { 'notes/task.md': file({ content: 'count to three\n' }) } })

test('OpenAI Agents SDK: files, commands, terminal, archive, port, resume, delete', async () => {
  const client = new E2BSandboxClient({ timeout: 600_000 })
  const session = await client.create(manifest(), { env: { GREETING: 'hello' }, exposedPorts: [8000] })
  try {
    const out = await session.execCommand({ cmd: 'cat notes/task.md; echo "$GREETING"; pwd; exit 5' })
    assert.match(out, /count to three\nhello\n\/home\/user\/workspace/)
    assert.match(out, /exit(ed)?.*5/i)

    const editor = session.createEditor()
    await editor.createFile({ type: 'create_file', path: 'count.py', diff: '+for i in range(1, 4):\n+    print(i)\n+' })
    assert.match(await session.execCommand({ cmd: 'python3 count.py' }), /1\n2\n3/)
    assert.equal(new TextDecoder().decode(await session.readFile({ path: 'count.py' })), 'for i in range(1, 4):\n    print(i)\n')
    assert.equal(await session.pathExists('nothing'), false)

    const terminal = await session.execCommand({ cmd: 'read -r line; echo "got $line"', tty: true, yieldTimeMs: 500 })
    const id = Number(/session ID (\d+)/i.exec(terminal)?.[1])
    assert.ok(id, terminal)
    assert.match(await session.writeStdin({ sessionId: id, chars: 'typed\n', yieldTimeMs: 3000 }), /got typed/)

    const endpoint = await session.resolveExposedPort(8000)
    assert.match(endpoint.host, /^8000-[a-z0-9]+\./)

    const archive = await session.persistWorkspace()
    await session.execCommand({ cmd: 'rm -rf notes count.py' })
    await session.hydrateWorkspace(archive)
    assert.match(await session.execCommand({ cmd: 'cat notes/task.md' }), /count to three/)

    const state = await client.deserializeSessionState(await client.serializeSessionState(session.state))
    const resumed = await client.resume(state)
    assert.match(await resumed.execCommand({ cmd: 'cat notes/task.md' }), /count to three/)
  } finally {
    await session.delete()
  }
})

test('OpenAI Agents SDK: a workspace kept as a snapshot', async () => {
  const client = new E2BSandboxClient({ timeout: 600_000, workspacePersistence: 'snapshot' })
  const session = await client.create(manifest())
  try {
    const snapshot = await session.persistWorkspace()
    await session.execCommand({ cmd: 'rm -rf notes' })
    await session.hydrateWorkspace(snapshot) // moves to a sandbox made from the snapshot
    assert.match(await session.execCommand({ cmd: 'cat notes/task.md' }), /count to three/)
  } finally {
    await session.delete()
  }
})
