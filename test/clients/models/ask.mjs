// The same as ask.py, with the SDKs for JavaScript.
import Anthropic from '@anthropic-ai/sdk'
import OpenAI from 'openai'

const [a, o] = [new Anthropic(), new OpenAI()]
const m = { model: 'm-1', max_tokens: 50, messages: [{ role: 'user', content: 'hello' }] }
if (process.argv[2] === 'spent') {
  await a.messages.create(m).then(() => console.log('anthropic answered'), (e) => console.log('anthropic', e.constructor.name))
  process.exit()
}
console.log('message', (await a.messages.create(m)).content[0].text)
let text = ''
const end = await a.messages.stream(m).on('text', (t) => (text += t)).finalMessage()
console.log('stream', text, end.usage.output_tokens)
console.log('count', (await a.messages.countTokens({ model: 'm-1', messages: m.messages })).input_tokens)
console.log('chat', (await o.chat.completions.create(m)).choices[0].message.content)
text = ''
for await (const c of await o.chat.completions.create({ ...m, stream: true })) text += c.choices[0].delta.content ?? ''
console.log('chat stream', text)
console.log('responses', (await o.responses.create({ model: 'm-1', input: 'hello' })).output_text)
console.log('embedding', JSON.stringify((await o.embeddings.create({ model: 'm-1', input: 'hello', encoding_format: 'float' })).data[0].embedding))
console.log('models', JSON.stringify((await o.models.list()).data.map((x) => x.id)))
