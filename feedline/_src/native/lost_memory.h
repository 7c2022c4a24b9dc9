/* Makes a copy out of a mapped file fail, instead of ending the process, if the file is truncated or its disk fails.
 *
 * The kernel reports such a read by SIGBUS, which ends the process. Between `lost_memory_guard` and
 * `lost_memory_release`, the signal handler jumps back to the guard instead. If other code causes a SIGBUS, the handler
 * writes the name of the file to stderr, and passes the signal on to the previous handler.
 *
 *   Guard guard;
 *   if (LOST_MEMORY(guard)) return MEMORY_LOST;  // guard.address could not be read or written
 *   copy();
 *   lost_memory_release(&guard);
 */

#if defined(__linux__)
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

typedef struct Guard {
  sigjmp_buf back;
  const void *volatile address;
  struct Guard *before;
} Guard;

/* In static TLS, so that access from a signal handler allocates nothing. */
static __thread Guard *volatile guarded __attribute__((tls_model("initial-exec")));
static struct sigaction handler_before;
static volatile int is_installed;

/* Write the name of the file that is mapped at an address to stderr, with async-signal-safe functions only. */
static void say_file(uintptr_t address) {
  static const char begin[] = "feedline: SIGBUS, and the process ends: ";
  static const char end[] = " is mapped, and was truncated, or its disk failed or is full\n";
  char block[1024], name[1024];
  uintptr_t from = 0, to = 0;
  int part = 0; /* the part of a line that is being read: 0 `from`, 1 `to`, 2 text before the name, 3 the name */
  size_t length = 0;
  const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (maps < 0) return;
  for (ssize_t got; (got = read(maps, block, sizeof(block))) > 0;)
    for (ssize_t i = 0; i < got; i++) {
      const char c = block[i];
      if (c == '\n') {
        if (part == 3 && from <= address && address < to) {
          ssize_t written = write(STDERR_FILENO, begin, sizeof(begin) - 1);
          written += write(STDERR_FILENO, name, length);
          written += write(STDERR_FILENO, end, sizeof(end) - 1);
          (void)written;
          close(maps);
          return;
        }
        from = to = 0, part = 0, length = 0;
      } else if (part < 2 && (c == '-' || c == ' ')) {
        part++;
      } else if (part < 2) {
        uintptr_t *number = part ? &to : &from;
        *number = *number << 4 | (uintptr_t)(c <= '9' ? c - '0' : c - 'a' + 10);
      } else {
        if (c == '/') part = 3;
        if (part == 3 && length < sizeof(name)) name[length++] = c;
      }
    }
  close(maps);
}

static void on_sigbus(int number, siginfo_t *info, void *context) {
  (void)context;
  const int fault = info->si_code > 0;
  if (guarded != NULL && (fault || info->si_code == SI_TKILL)) { /* SI_TKILL: another handler raised the signal again */
    guarded->address = fault ? info->si_addr : NULL;
    siglongjmp(guarded->back, 1);
  }
  if (fault) say_file((uintptr_t)info->si_addr);
  sigaction(SIGBUS, &handler_before, NULL);
  if (!fault) raise(number); /* after a fault, returning raises the signal again */
}

/* Install `on_sigbus`: the first time instead of any other handler, later only if no handler is installed. */
static void install_handler(void) {
  struct sigaction now, own;
  if (sigaction(SIGBUS, NULL, &now)) return;
  const int nobody = !(now.sa_flags & SA_SIGINFO) && (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN);
  if ((now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_sigbus) || (is_installed && !nobody)) return;
  memset(&own, 0, sizeof(own));
  own.sa_sigaction = on_sigbus;
  own.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK; /* SA_NODEFER: a jump leaves SIGBUS unblocked */
  handler_before = now;
  is_installed = 1;
  sigaction(SIGBUS, &own, NULL);
}

static inline void lost_memory_guard(Guard *guard) {
  install_handler(); /* again, if another library removed it */
  guard->address = NULL;
  guard->before = guarded;
  guarded = guard;
}

static inline void lost_memory_release(const Guard *guard) { guarded = guard->before; }

#define LOST_MEMORY(guard) \
  (lost_memory_guard(&(guard)), sigsetjmp((guard).back, 0) ? (lost_memory_release(&(guard)), 1) : 0)

#else

typedef struct {
  const void *address;
} Guard;

static inline void install_handler(void) {}
#define LOST_MEMORY(guard) ((guard).address = NULL, 0)
static inline void lost_memory_release(const Guard *guard) { (void)guard; }

#endif
