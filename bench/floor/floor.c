// The floor: how fast this machine starts a process. Usage:
//   floor each WORKERS COUNT   each worker starts /bin/true COUNT times; prints one duration per line
//   floor burst COUNT          starts COUNT at once; prints the time until all have ended
//   floor serve                starts one for each byte on standard input, which is a socket, and sends the
//                              byte back once it has ended
// Durations are nanoseconds.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

static long long now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static pid_t start(void) {
	static char *argv[] = {"true", NULL};
	pid_t pid = vfork();
	if (pid == 0) {
		execve("/bin/true", argv, environ);
		_exit(127);
	}
	return pid;
}

static void worker(long long *out, int count) {
	for (int i = 0; i < count; i++) {
		long long begun = now();
		int status = 0;
		pid_t pid = start();
		if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) exit(1);
		out[i] = now() - begun;
	}
}

static int each(int workers, int count) {
	size_t size = sizeof(long long) * workers * count;
	long long *out = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (out == MAP_FAILED) return 1;
	long long begun = now();
	for (int w = 0; w < workers; w++) {
		pid_t pid = fork();
		if (pid < 0) return 1;
		if (pid == 0) {
			worker(out + (long)w * count, count);
			_exit(0);
		}
	}
	for (int w = 0; w < workers; w++) {
		int status = 0;
		if (wait(&status) < 0 || status != 0) return 1;
	}
	printf("total %lld\n", now() - begun);
	for (long i = 0; i < (long)workers * count; i++) printf("%lld\n", out[i]);
	return 0;
}

static int burst(int count) {
	long long begun = now();
	for (int i = 0; i < count; i++)
		if (start() < 0) return 1;
	for (int i = 0; i < count; i++) {
		int status = 0;
		if (wait(&status) < 0 || status != 0) return 1;
	}
	printf("total %lld\n", now() - begun);
	return 0;
}

static int serve(void) {
	char c;
	while (read(0, &c, 1) == 1) {
		int status = 0;
		pid_t pid = start();
		if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) return 1;
		if (write(0, &c, 1) != 1) return 1;
	}
	return 0;
}

int main(int argc, char **argv) {
	if (argc == 4 && !strcmp(argv[1], "each")) return each(atoi(argv[2]), atoi(argv[3]));
	if (argc == 3 && !strcmp(argv[1], "burst")) return burst(atoi(argv[2]));
	if (argc == 2 && !strcmp(argv[1], "serve")) return serve();
	fprintf(stderr, "usage: floor each WORKERS COUNT | floor burst COUNT | floor serve\n");
	return 2;
}
