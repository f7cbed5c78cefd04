// The HTTP API with fetch: a sandbox, a file, a command, code, and its end.

const url = process.env.CASEMATE_URL!
const key = process.env.CASEMATE_API_KEY!

/** Calls the API with a JSON body, or with bytes as they are, and returns the JSON answer. */
async function call(method: string, path: string, body?: object | Uint8Array): Promise<any> {
  const raw = body instanceof Uint8Array
  const answer = await fetch(url + path, {
    method,
    headers: { Authorization: `Bearer ${key}`, 'Content-Type': raw ? 'application/octet-stream' : 'application/json' },
    body: raw ? (body as Uint8Array<ArrayBuffer>) : body && JSON.stringify(body),
  })
  const json = await answer.json()
  if (!answer.ok) throw new Error(`${method} ${path}: ${json.message} ${json.hint ?? ''}`)
  return json
}

const text = (base64: string) => Buffer.from(base64, 'base64').toString()

const box = await call('POST', '/v1/sandboxes', { lifetime: '600s', limits: { memoryBytes: 256 * 1024 * 1024 } })
const path = `/v1/sandboxes/${box.id}`
try {
  const query = new URLSearchParams({ path: 'data/numbers.txt', parents: 'true' })
  await call('PUT', `${path}/files?${query}`, new TextEncoder().encode('3\n1\n2\n'))

  let ran = await call('POST', `${path}/execute`, { process: { argv: ['sort', 'data/numbers.txt'], timeout: '10s' } })
  console.log('sorted:', text(ran.stdout).trim().split('\n').join(' '))

  ran = await call('POST', `${path}/execute`, { process: { argv: ['sh', '-c', 'echo oops >&2; exit 3'] } })
  console.log('exit code:', ran.process.code, text(ran.stderr).trim())

  // Code runs in an interpreter that keeps its variables between calls.
  await call('POST', `${path}/code`, { run: { language: 'python', code: 'numbers = [3, 1, 2]' } })
  ran = await call('POST', `${path}/code`, { run: { language: 'python', code: 'sum(numbers)' } })
  console.log('sum:', ran.results[0].data['text/plain'])
} finally {
  console.log('then:', (await call('DELETE', path)).state)
}
