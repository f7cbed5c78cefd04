// The official TypeScript client of the Model Context Protocol, over both transports.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { Client } from '@modelcontextprotocol/sdk/client/index.js'
import { StdioClientTransport } from '@modelcontextprotocol/sdk/client/stdio.js'
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js'

const transports = {
  stdio: () =>
    new StdioClientTransport({
      command: 'casemate',
      args: ['mcp'],
      env: { PATH: process.env.PATH, CASEMATE_URL: process.env.CASEMATE_URL, CASEMATE_API_KEY: process.env.CASEMATE_API_KEY },
    }),
  http: () =>
    new StreamableHTTPClientTransport(new URL(process.env.CASEMATE_URL + '/mcp'), {
      requestInit: { headers: { Authorization: `Bearer ${process.env.CASEMATE_API_KEY}` } },
    }),
}

async function sandboxes() {
  const answer = await fetch(process.env.CASEMATE_URL + '/v1/sandboxes', { headers: { Authorization: `Bearer ${process.env.CASEMATE_API_KEY}` } })
  return (await answer.json()).sandboxes ?? []
}

async function eventually(what, holds) {
  const deadline = Date.now() + 120_000
  while (!(await holds())) {
    assert.ok(Date.now() < deadline, `not within two minutes: ${what}`)
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

for (const [name, transport] of Object.entries(transports)) {
  test(`MCP over ${name}`, async () => {
    const client = new Client({ name: 'riders', version: '1' })
    const connection = transport()
    await client.connect(connection)
    try {
      assert.match(client.getInstructions(), /sandbox/)
      const { tools } = await client.listTools()
      assert.ok(tools.some((t) => t.name === 'run_command' && t.inputSchema.required.includes('command')))
      const call = async (tool, args, options) => client.callTool({ name: tool, arguments: args }, undefined, options)

      const ran = await call('run_command', { command: 'echo out; echo err >&2; exit 3' })
      assert.equal(ran.structuredContent.output, 'out\nerr\n') // the client checks it against the schema, too
      assert.equal(ran.structuredContent.exit_code, 3)
      assert.match(ran.content[0].text, /exit code 3/)

      await call('write_file', { path: 'a/b.txt', text: 'grüße\n' })
      assert.equal((await call('read_file', { path: 'a/b.txt' })).content[0].text, 'grüße\n')
      assert.equal((await call('run_code', { code: '6*7' })).structuredContent.values[0].data['text/plain'], '42')

      const heard = []
      await call('run_command', { command: 'for i in 1 2 3; do echo step $i; sleep 0.8; done' }, { onprogress: (p) => heard.push(p.message) })
      assert.ok(heard.some((m) => m.startsWith('step')), `progress: ${heard}`)

      const abort = new AbortController()
      const started = Date.now()
      const cut = call('run_command', { command: 'sleep 600', timeout_seconds: 900 }, { signal: abort.signal })
      setTimeout(() => abort.abort('enough'), 500)
      await assert.rejects(cut)
      assert.ok(Date.now() - started < 120_000) // the command would take 600
      await eventually('the command ends with its call', async () => {
        const left = await call('run_command', { command: 'pgrep -x sleep | wc -l' })
        return left.structuredContent.output.startsWith('0')
      })

      const refused = await call('read_file', { path: 'nothing' })
      assert.equal(refused.isError, true)
      assert.match(refused.content[0].text, /not_found.*\nWhat to do/)
      assert.equal((await sandboxes()).length, 1)
    } finally {
      if (connection.terminateSession) await connection.terminateSession()
      await client.close()
    }
    await eventually("the session's sandbox is gone", async () => (await sandboxes()).length === 0)
  })
}
