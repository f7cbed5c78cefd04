// A connection breaks while a process prints; what was missed is read by its offset.
//
// Output is kept by the sandbox and counted in bytes, standard output and error in one, so a program
// that was away, or was started anew, goes on where it was. Nothing is lost, and nothing is seen twice.

const url = process.env.CASEMATE_URL!
const auth = { Authorization: `Bearer ${process.env.CASEMATE_API_KEY}` }

async function call(method: string, path: string, body?: object): Promise<any> {
  const answer = await fetch(url + path, { method, headers: { ...auth, 'Content-Type': 'application/json' }, body: body && JSON.stringify(body) })
  return answer.json()
}

/** Returns what was printed from offset on, where to go on, and how the process ended once it has. */
async function read(path: string, offset: number) {
  const answer = await fetch(`${url}${path}/output?offset=${offset}&wait=30s`, { headers: { ...auth, Accept: 'application/octet-stream' } })
  return {
    text: await answer.text(),
    next: Number(answer.headers.get('Casemate-Next-Offset')),
    end: answer.headers.get('Casemate-Process-End'),
  }
}

const box = (await call('POST', '/v1/sandboxes', { lifetime: '600s' })).id
try {
  const path = `/v1/sandboxes/${box}/processes`
  const script = 'for i in 1 2 3 4 5 6; do echo line $i; sleep 0.2; done'
  // The id is ours: were the answer lost, asking again would attach to the same process.
  await call('POST', path, { process: { id: 'counter', argv: ['sh', '-c', script] } })

  const first = await read(`${path}/counter`, 0)
  console.log('before:', first.text.split('\n')[0])
  // Here the connection, or this whole program, may break. All that is needed later: sandbox, process, offset.
  await call('GET', `${path}/counter/wait?timeout=30s`)

  let seen = first.text
  let at = first
  while (at.end === null) {
    at = await read(`${path}/counter`, at.next)
    seen += at.text
  }
  console.log('in all:', seen.trim().split('\n').join(', '))
  console.log('end:', at.end)
} finally {
  await call('DELETE', `/v1/sandboxes/${box}`)
}
