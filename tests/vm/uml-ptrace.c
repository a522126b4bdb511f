/* Loaded into user-mode Linux by uml.sh. Up to 6.12 that kernel keeps 2696 bytes of a process's vector registers, and
 * hands as many back. A host whose CPU has more, as AMX, takes all or nothing, and the guest dies in its first process.
 * So what the guest doesn't know is filled up with what the host has. */
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

long ptrace(enum __ptrace_request request, ...) {
    static char all[1 << 16];
    va_list list;
    va_start(list, request);
    long pid = va_arg(list, long);
    void *address = va_arg(list, void *);
    void *data = va_arg(list, void *);
    va_end(list);

    if (request == PTRACE_SETREGSET && address == (void *)NT_X86_XSTATE) {
        struct iovec *known = data, whole = {all, sizeof all};
        if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, address, &whole) == 0 && whole.iov_len > known->iov_len) {
            memcpy(all, known->iov_base, known->iov_len);
            return syscall(SYS_ptrace, request, pid, address, &whole);
        }
    }
    /* The system call stores a word that it peeks at; the library's function returns it. */
    long word = 0;
    int peeks = request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER;
    long result = syscall(SYS_ptrace, request, pid, address, peeks ? &word : data);
    return peeks && result == 0 ? word : result;
}
