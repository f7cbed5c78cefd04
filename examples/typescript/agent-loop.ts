// An agent's loop whose tool is a sandbox. The model is a script here: put a call of yours in its place.

const url = process.env.CASEMATE_URL!
const key = process.env.CASEMATE_API_KEY!

type Reply = { tool: 'run_command'; input: { command: string } } | { text: string }
type Message = { role: 'user' | 'assistant' | 'tool'; content: string }

// What a model is told about the tool, in the form that most models take.
export const tool = {
  name: 'run_command',
  description: 'Run a shell command in a sandbox. Files stay between calls.',
  input_schema: { type: 'object', properties: { command: { type: 'string' } }, required: ['command'] },
}

async function call(method: string, path: string, body?: object): Promise<any> {
  const headers = { Authorization: `Bearer ${key}`, 'Content-Type': 'application/json' }
  const answer = await fetch(url + path, { method, headers, body: body && JSON.stringify(body) })
  const json = await answer.json()
  if (!answer.ok) throw new Error(`${json.message} ${json.hint ?? ''}`)
  return json
}

/** The tool: what the model gets to see of a command. */
async function runCommand(box: string, command: string): Promise<string> {
  const ran = await call('POST', `/v1/sandboxes/${box}/execute`, { process: { argv: ['sh', '-c', `(${command}) 2>&1`], timeout: '30s' } })
  const output = Buffer.from(ran.stdout ?? '', 'base64').toString().slice(-8000)
  const how = ran.process.end === 'exited' ? `exit code ${ran.process.code ?? 0}` : ran.process.end
  return `${output}[${how}]`
}

/** Says what to do next. A real one reads the messages and the tool; this one has its lines learnt. */
async function model(messages: Message[]): Promise<Reply> {
  const script = [
    "printf 'def square(x):\\n    return x + x\\n' > calc.py",
    "python3 -c 'import calc; assert calc.square(3) == 9'",
    "sed -i 's/x + x/x ** 2/' calc.py",
    "python3 -c 'import calc; print(calc.square(3))'",
  ]
  const turns = messages.filter((m) => m.role === 'assistant').length
  if (turns < script.length) return { tool: 'run_command', input: { command: script[turns] } }
  return { text: 'square() was wrong for 3, and is right now: ' + messages.at(-1)!.content.split('[')[0].trim() }
}

const box = (await call('POST', '/v1/sandboxes', { lifetime: '600s', labels: { agent: 'example' } })).id
try {
  const messages: Message[] = [{ role: 'user', content: 'write square() and test it' }]
  for (let turn = 0; ; turn++) {
    if (turn === 20) throw new Error('the agent did not come to an end')
    const reply = await model(messages)
    messages.push({ role: 'assistant', content: JSON.stringify(reply) })
    if (!('tool' in reply)) {
      console.log('agent:', reply.text)
      break
    }
    const result = await runCommand(box, reply.input.command)
    console.log(`$ ${reply.input.command.slice(0, 60)}\n  ${result.trim().split('\n').at(-1)}`)
    messages.push({ role: 'tool', content: result })
  }
} finally {
  await call('DELETE', `/v1/sandboxes/${box}`)
}
