// The suite's own settings, with the SDK of the registry in the place of its source.
import { defineConfig } from 'vitest/config'
import path from 'node:path'

const dist = path.resolve('node_modules/e2b-npm/dist/index.mjs')
const resolve = { alias: [{ find: /^(\.\.\/)+src(\/index(\.js)?|\/errors(\.js)?)?$/, replacement: dist }] }
const test = {
  isolate: true, globals: false, environment: 'node', setupFiles: ['tests/globalFetchFallback.setup.ts'],
  env: { ...(process.env as Record<string, string>) },
}
export default defineConfig({
  test: {
    projects: [
      { resolve, test: { ...test, name: 'unit', include: ['tests/**/*.test.ts'], exclude: ['tests/runtimes/**', 'tests/template/**'], testTimeout: 30_000 } },
      { resolve, test: { ...test, name: 'template', include: ['tests/template/**/*.test.ts'], testTimeout: 180_000 } },
    ],
  },
})
