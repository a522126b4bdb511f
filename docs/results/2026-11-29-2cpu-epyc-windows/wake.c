/* A thread that sleeps on an eventfd, on CPU 0, and one that polls and signals it after a delay, on CPU 1: round trips a second by the delay.
 * cc -O2 -o wake wake.c -lpthread && ./wake NANOSECONDS SECONDS */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

static _Atomic long requests, over;
static int event;
static long delay;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void *server(void *none) {
    long seen = 0;
    pin(1);
    while (!over) {
        long n = requests;
        if (n == seen) {
            __builtin_ia32_pause();
            continue;
        }
        seen = n;
        if (delay)
            for (double until = now() + delay * 1e-9; now() < until;)
                __builtin_ia32_pause();
        uint64_t one = 1;
        write(event, &one, sizeof one);
    }
    return none;
}

int main(int count, char **words) {
    if (count != 3)
        return 2;
    pthread_t thread;
    delay = atol(words[1]);
    event = eventfd(0, 0);
    pthread_create(&thread, 0, server, 0);
    pin(0);
    double begin = now(), end = begin + atof(words[2]), last;
    long trips = 0;
    while ((last = now()) < end) {
        uint64_t value;
        requests++;
        read(event, &value, sizeof value);
        trips++;
    }
    printf("%5ld ns: %.1f thousand a second, %.2f us\n", delay, trips / (last - begin) / 1e3, (last - begin) / trips * 1e6);
    over = 1;
    requests++;
    pthread_join(thread, 0);
}
