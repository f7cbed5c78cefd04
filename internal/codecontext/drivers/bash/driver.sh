# The bash driver: it keeps a shell between runs, and tells how each run ended.
#
# It speaks newline-delimited JSON on descriptor 3; package drivers describes the messages. It needs no
# program but bash. There are two shells: this one, the manager, has the control socket; the other one,
# an interactive shell without a terminal, runs the code, and never sees the socket. Interactive, because only such
# a shell drops what it does at SIGINT and goes on with all its variables.
#
# The manager sends the shell one line a time and gets one line back, when the shell asks for the next:
# its exit status, which line that was, and its working directory.

exec {ctl}<&3 3<&- 4<&-
exec {file}<&5 5<&- # long code: a shell reads a line from a socket byte by byte
exec {out}>&1
set -m # a process group of its own for the shell, and SIGINT not ignored there

running='' interrupted='' shell='' dir=$PWD

# start_shell starts a shell. What it would say of a missing terminal goes nowhere: its stderr is put in
# place by its first line.
start_shell() {
	coproc SHELL_OF_RUNS {
		PS1='' PS2='' exec bash --noprofile --norc --noediting -i 200>&1 201>&2 202<&"$file" 1>&"$out" 2>/dev/null {ctl}<&- {out}>&- {file}<&-
	}
	shell=$SHELL_OF_RUNS_PID
	exec {answers}<&"${SHELL_OF_RUNS[0]}"- {commands}>&"${SHELL_OF_RUNS[1]}"-
	local line='exec 2>&201 201>&-; export -n PS1 PS2; unset HISTFILE MAILCHECK TMOUT; set +o history +H +m'
	line+='; __casemate_status() { builtin return "$1"; }'
	line+='; exit() { builtin exit "$@" 2>/dev/null; }'
	line+='; readonly PROMPT_COMMAND='"'"'builtin printf "%d %s %q\n" "$?" "${__casemate_turn:-x}" "$PWD" >&200'"'"
	order "builtin cd -- $(quoted "$dir") 2>/dev/null; $line"
	answer
}

quoted() {
	local q
	printf -v q %q "$1"
	printf %s "$q"
}

# order sends the shell a line.
order() {
	((turn += 1))
	printf '__casemate_turn=%d __casemate_code=; %s\n' "$turn" "$1" >&"$commands"
}
turn=0

# answer waits for the shell's answer to the last line, and leaves it in $status and $dir; false when the
# shell ended. A program that outlived an earlier line and is ended only now makes the shell ask once more: that
# is no answer to this line. An interrupt may also make it drop the line unread, so it is asked whether it did.
answer() {
	local place code seen
	while :; do
		IFS=' ' read -r -t 0.5 -u "$answers" status seen place
		code=$?
		if ((code == 0)); then
			case $seen in
			"$((turn - 1))")
				[[ ! $interrupted ]] || printf '__casemate_turn=%d.dropped\n' "$turn" >&"$commands"
				continue
				;;
			"$((turn - 1)).dropped") continue ;;
			"$turn.dropped") status=130 ;;
			esac
			eval "dir=$place" # the shell's own quoting
			return 0
		fi
		((code > 128)) || break
		again
	done
	wait "$shell" 2>/dev/null
	status=$?
	exec {answers}<&- {commands}>&-
	return 1
}

# again repeats an interrupt whose run goes on a second later: a command that was just being started, and
# no program yet, does not notice one. It may even outlive the run, and the shell waits for it before it
# reads on; so the next run looks for such a one too. Commands in the background ignore the signal.
again() {
	((repeats > 0)) || return
	((repeats--))
	if [[ $interrupted ]]; then
		kill -INT -- "-$shell"
	else
		local children=''
		read -r children </proc/"$shell"/task/"$shell"/children # it ends without a newline
		[[ $children ]] && kill -INT $children
	fi
} 2>/dev/null

on_interrupt() {
	[[ $running ]] || return
	interrupted=1 repeats=3
	kill -INT -- "-$shell" 2>/dev/null
}
repeats=0
trap on_interrupt INT

start_shell
LC_ALL=C # bytes from here on; the shell has its own

say() { printf '%s\n' "$1" >&"$ctl"; }

# text leaves in $decoded what the inside of a JSON string says, with \1 and \2 in place of \\ and \".
# It goes through the escapes once: replacing them in the whole text again and again takes seconds.
text() {
	decoded=${1//$'\2'/\"}
	if [[ $1 == *\\* ]]; then
		local pieces out=() i piece code low=0
		IFS='\' read -r -d '' -a pieces <<<"$decoded"
		pieces[-1]=${pieces[-1]%$'\n'} # the newline that <<< added
		out=("${pieces[0]}")
		for ((i = 1; i < ${#pieces[@]}; i++)); do
			piece=${pieces[i]}
			case $piece in
			n*) out+=($'\n' "${piece:1}") ;;
			t*) out+=($'\t' "${piece:1}") ;;
			r*) out+=($'\r' "${piece:1}") ;;
			b*) out+=($'\b' "${piece:1}") ;;
			f*) out+=($'\f' "${piece:1}") ;;
			u*)
				code=$((16#${piece:1:4}))
				if ((code >= 0xd800 && code < 0xdc00)); then
					low=$code
					continue
				elif ((low && code >= 0xdc00 && code < 0xe000)); then
					code=$((0x10000 + ((low - 0xd800) << 10) + code - 0xdc00))
				fi
				low=0
				utf8 "$code"
				out+=("$char" "${piece:5}")
				;;
			*) out+=("$piece") ;; # a slash
			esac
		done
		printf -v decoded %s "${out[@]}"
	fi
	decoded=${decoded//$'\1'/\\}
}

# utf8 leaves a code point's bytes in $char; a shell has no NUL.
utf8() {
	local c=$1 form
	if ((c == 0)); then
		char=''
		return
	elif ((c < 0x80)); then
		printf -v form '\\x%x' "$c"
	elif ((c < 0x800)); then
		printf -v form '\\x%x\\x%x' $((0xc0 | c >> 6)) $((0x80 | c & 63))
	elif ((c < 0x10000)); then
		printf -v form '\\x%x\\x%x\\x%x' $((0xe0 | c >> 12)) $((0x80 | c >> 6 & 63)) $((0x80 | c & 63))
	else
		printf -v form '\\x%x\\x%x\\x%x\\x%x' $((0xf0 | c >> 18)) $((0x80 | c >> 12 & 63)) $((0x80 | c >> 6 & 63)) $((0x80 | c & 63))
	fi
	printf -v char "$form"
}

# parse reads a message: a flat object whose values are strings, literals, or one object of strings.
parse() {
	local line=$1 parts i key rest
	op='' id='' code='' long='' silent='' env=()
	line=${line//\\\\/$'\1'}
	line=${line//\\\"/$'\2'}
	IFS='"' read -r -d '' -a parts <<<"$line" # now every quote begins or ends a string
	i=1
	while ((i + 1 < ${#parts[@]})); do
		key=${parts[i]} rest=${parts[i + 1]//[[:space:]]/}
		case $rest in
		:)
			case $key in
			op) op=${parts[i + 2]} ;;
			id) id=${parts[i + 2]//$'\2'/\\\"} id=${id//$'\1'/\\\\} ;;
			code) text "${parts[i + 2]}"; code=$decoded ;;
			esac
			((i += 4))
			;;
		:\{)
			((i += 2)) # the first name inside
			while :; do
				text "${parts[i]}"
				env+=("$decoded")
				text "${parts[i + 2]}"
				env+=("$decoded")
				[[ ${parts[i + 3]} == *\}* ]] && break
				((i += 4))
			done
			((i += 4))
			;;
		*)
			[[ $key == silent && $rest == :true* ]] && silent=1
			[[ $key == file && $rest == :true* ]] && long=1
			((i += 2))
			;;
		esac
	done
}

# with_env tells the shell a run's own variables, and without_env takes them back.
with_env() {
	local i names='' line='__casemate_old=();'
	for ((i = 0; i < ${#env[@]}; i += 2)); do
		[[ ${env[i]} =~ ^[a-zA-Z_][a-zA-Z0-9_]*$ ]] || continue
		names+=" ${env[i]}"
		line+=" [[ -v ${env[i]} ]] && __casemate_old+=(\"\$(builtin declare -p ${env[i]})\") || __casemate_old+=('unset ${env[i]}');"
		line+=" builtin export ${env[i]}=$(quoted "${env[i + 1]}");"
	done
	order "$line"
	answer
}

without_env() {
	# declare in a for loop at the top of the shell sets the shell's own variables
	order 'for __casemate_line in "${__casemate_old[@]}"; do [[ $__casemate_line == unset* ]] || builtin unset "$(__casemate_name=${__casemate_line#* }; __casemate_name=${__casemate_name#* }; builtin printf %s "${__casemate_name%%=*}")"; builtin eval "$__casemate_line"; done; builtin unset __casemate_old __casemate_line'
	answer
}

run() {
	local quote alive=1 error='' value=''
	interrupted='' running=1
	[[ $silent ]] || ((count += 1))
	((${#env[@]})) && with_env
	printf -v quote %q "$code"
	# Numbering the line has set $? to 0; the code finds the last run's, as in any shell.
	local before=''
	((status == 0)) || before="__casemate_status $status || "
	if [[ $long ]]; then
		before="__casemate_code=\$(</proc/self/fd/202); $before"
		quote='"$__casemate_code"'
	fi
	order "${before}builtin eval -- $quote </dev/null 200>&- 202<&-"
	answer || alive=''
	running=''
	local code=$status
	if [[ ! $alive ]]; then
		value="exit status $code" error=ExitError
		local how="The shell left with exit status $code."
		((code > 128)) && value="signal $((code - 128))" how="The shell was ended by signal $((code - 128))."
		how+=' A new one goes on in the same directory; variables, functions and options are gone.'
		start_shell
		say '{"ev":"error","id":"'"$id"'","name":"'"$error"'","value":"'"$value"'","traceback":"'"$how"'"}'
	else
		((${#env[@]})) && without_env
		if [[ $interrupted ]] && ((code == 130)); then
			say '{"ev":"error","id":"'"$id"'","name":"InterruptError","value":"the run was interrupted","traceback":""}'
		elif ((code != 0)); then
			say '{"ev":"error","id":"'"$id"'","name":"ExitError","value":"exit status '"$code"'","traceback":""}'
		fi
	fi
	say '{"ev":"end","id":"'"$id"'","count":'"$count"',"exit_code":'"$code"'}'
}

count=0
say '{"ev":"ready","language":"bash","version":"'"${BASH_VERSINFO[0]}.${BASH_VERSINFO[1]}.${BASH_VERSINFO[2]}"'","pid":'"$$"'}'
while IFS= read -r -u "$ctl" line; do
	parse "$line"
	[[ $op == run ]] && run
done
kill -KILL -- "-$shell" 2>/dev/null
exit 0
