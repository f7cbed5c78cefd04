package mcp

const intro = `Casemate runs commands, code and files in sandboxes: isolated Linux environments on a machine that its owner runs. ` +
	`Use them for anything that should not run on the user's own machine.

`

const ownBox = `Tools that take "sandbox" use this session's own sandbox when it is left out. It is made by the first such call and ` +
	`deleted, with its files, when the session ends: read what must stay with read_file. For something that outlives the session, or ` +
	`for several environments side by side, use create_sandbox and pass its id or name; delete_sandbox ends it.

`

const givenBox = `Tools that take "sandbox" use the sandbox that was set up for this session when it is left out. It was there before and ` +
	`stays afterwards. For other environments use create_sandbox and pass its id or name; delete_sandbox ends it.

`

const rules = `- run_command runs a shell command line to its end. Files and installed packages stay; the shell's variables and directory do not: pass cwd and env.
- run_code runs Python, JavaScript, TypeScript or bash in an interpreter whose variables last between calls: for calculations, data and charts.
- start_process is for servers, watchers and anything that takes longer than a minute; then read_output (from next_offset, with wait_seconds) and send_input.
- Long output is cut in the middle, never silently: the result says which bytes were left out, and read_output returns them.
- Relative paths start at the user's home directory.
- A sandbox has no network unless its owner opened it. An error names what was refused and what to do.`

// instructions tell a model how the tools fit together.
func instructions(given string) string {
	if given != "" {
		return intro + givenBox + rules
	}
	return intro + ownBox + rules
}
