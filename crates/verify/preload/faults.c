/* Faults of disk and clock for a process of a run: a library that the process is started with (LD_PRELOAD).
 *
 * The file that VERIFY_FAULTS_CONTROL names is mapped into the process; the run changes it while the process works:
 *   byte 0       disk: 'n' as it is, 'f' a sync fails, 'w' a write fails, 's' a sync takes 700 ms
 *   bytes 8..16  milliseconds that are added to the wall clock, little endian
 * If VERIFY_FAULTS_UNDO names a folder, what is written to files below VERIFY_FAULTS_FOLDER and not synced yet is kept there, so
 * that the run can take it away again after it has killed the process, as a power cut does. Only regular files are touched.
 *
 * An undo file is a sequence of records: offset, length before, length of the data (8 bytes each), then the data that was there.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile const unsigned char *control;
static char folder[PATH_MAX], undo[PATH_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Not libc's functions: those are replaced here. */
static ssize_t raw_write(int fd, const void *data, size_t length) { return syscall(SYS_write, fd, data, length); }
static int raw_fsync(int fd) { return (int)syscall(SYS_fsync, fd); }

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("VERIFY_FAULTS_CONTROL");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *map = mmap(NULL, 16, PROT_READ, MAP_SHARED, fd, 0);
        control = map == MAP_FAILED ? NULL : map;
        close(fd);
    }
    const char *below = getenv("VERIFY_FAULTS_FOLDER"), *kept = getenv("VERIFY_FAULTS_UNDO");
    if (below && kept && realpath(below, folder)) snprintf(undo, sizeof undo, "%s", kept);
}

static char disk(void) { return control ? (char)control[0] : 'n'; }

static int is_file(int fd) {
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
}

/* The undo file of a file whose unsynced writes are kept; 0 for any other. The shared memory beside the log is not durable. */
static int undo_path(int fd, char *out, size_t length) {
    char link[64], path[PATH_MAX];
    if (!undo[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    size_t prefix = strlen(folder);
    if (strncmp(path, folder, prefix) != 0 || path[prefix] != '/' || strchr(path + prefix + 1, '/')) return 0;
    if (strstr(path + prefix, "-shm") || strstr(path + prefix, ".lock")) return 0;
    return snprintf(out, length, "%s/%s", undo, path + prefix + 1) < (int)length;
}

/* Keeps what a write to [offset, offset + length) replaces. A file is damaged otherwise, so a problem ends the process. */
static void keep(int fd, off_t offset, size_t length) {
    char path[PATH_MAX];
    struct stat status;
    if (!is_file(fd) || !undo_path(fd, path, sizeof path)) return;
    pthread_mutex_lock(&lock);
    if (fstat(fd, &status) != 0) abort();
    size_t there = offset >= status.st_size ? 0 : (size_t)(status.st_size - offset);
    if (there > length) there = length;
    char *record = malloc(24 + there);
    uint64_t head[3] = {(uint64_t)offset, (uint64_t)status.st_size, there};
    memcpy(record, head, 24);
    if (there && pread(fd, record + 24, there, offset) != (ssize_t)there) abort();
    int to = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (to < 0 || raw_write(to, record, 24 + there) != (ssize_t)(24 + there)) abort();
    close(to);
    free(record);
    pthread_mutex_unlock(&lock);
}

static int sync_with(int fd, int (*real)(int)) {
    if (!is_file(fd)) return real(fd);
    if (disk() == 'f') {
        errno = EIO;
        return -1;
    }
    if (disk() == 's') {
        struct timespec wait = {0, 700 * 1000 * 1000};
        nanosleep(&wait, NULL);
    }
    char path[PATH_MAX];
    int kept = undo_path(fd, path, sizeof path);
    if (kept) pthread_mutex_lock(&lock);
    int done = real(fd);
    if (kept) {
        if (done == 0) unlink(path);
        pthread_mutex_unlock(&lock);
    }
    return done;
}

static int raw_fdatasync(int fd) { return (int)syscall(SYS_fdatasync, fd); }
int fsync(int fd) { return sync_with(fd, raw_fsync); }
int fdatasync(int fd) { return sync_with(fd, raw_fdatasync); }

static int write_fails(int fd) {
    if (disk() != 'w' || !is_file(fd)) return 0;
    errno = EIO;
    return 1;
}

ssize_t write(int fd, const void *data, size_t length) {
    if (write_fails(fd)) return -1;
    if (undo[0]) {
        off_t at = lseek(fd, 0, SEEK_CUR);
        if (at >= 0) keep(fd, at, length);
    }
    return raw_write(fd, data, length);
}

ssize_t pwrite64(int fd, const void *data, size_t length, off_t offset) {
    if (write_fails(fd)) return -1;
    keep(fd, offset, length);
    return syscall(SYS_pwrite64, fd, data, length, offset);
}
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return pwrite64(fd, data, length, offset); }

int ftruncate64(int fd, off_t length) {
    struct stat status;
    if (write_fails(fd)) return -1;
    if (undo[0] && fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) {
        keep(fd, length, status.st_size > length ? (size_t)(status.st_size - length) : 0);
    }
    return (int)syscall(SYS_ftruncate, fd, length);
}
int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(clock, now);
    if (done == 0 && clock == CLOCK_REALTIME && control) {
        int64_t step;
        memcpy(&step, (const unsigned char *)control + 8, 8);
        int64_t ns = now->tv_nsec + (step % 1000) * 1000000;
        now->tv_sec += step / 1000;
        if (ns < 0) { ns += 1000000000; now->tv_sec -= 1; }
        if (ns >= 1000000000) { ns -= 1000000000; now->tv_sec += 1; }
        now->tv_nsec = ns;
    }
    return done;
}
