/* Every intercepted call that takes a socket or a set, with each flag alone and in pairs, blocking or not, with and without a time limit, with
 * bad pointers and lengths, on connections that have been through this and that. Usage:
 *
 *     matrix calls                  prints each call's name and the number of its cases
 *     matrix cases                  prints each case's number and what it is
 *     matrix kernel | nic | moving  plays the cases that the standard input lists, a line each: a case's number, and how often the peer has
 *                                   to act until the call returns (-1 if that is not known)
 *
 * Prints a line for each: the case, a bar, what came of it. A call that waits is ended by the peer, which acts once it sees that the thread
 * sleeps; where the kernel's own call is known not to wait, it does not act. In `nic` and `moving` the connection is on the NIC before anything
 * comes. In `moving` it is moved all the time, and at least once while a call waits. Peers are the kernel's. */

#include "matrix/asks.h"
#include "matrix/stage.h"
#include "matrix/transfers.h"
#include "matrix/waits.h"

#define ALL_MODES (1 << BLOCKING | 1 << NONBLOCKING | 1 << LONG | 1 << SHORT)
#define PLAIN_MODES (1 << BLOCKING | 1 << NONBLOCKING)

static const struct named no_flags[0];

#define PLAIN_RECEIVES(name, make, shapes) {name, make, no_flags, 0, 1, shapes, COUNT(shapes), 0, ALL_MODES | 1 << LOW_WATER, receiving, COUNT(receiving), NULL}
#define PLAIN_SENDS(name, make, shapes, arm) {name, make, no_flags, 0, 1, shapes, COUNT(shapes), 1, ALL_MODES, sending, COUNT(sending), arm}

static const struct call calls[] = {
    PLAIN_RECEIVES("read", make_read, receive_shapes),
    PLAIN_RECEIVES("__read_chk", make_read_chk, only_usual),
    PLAIN_RECEIVES("readv", make_readv, vector_shapes),
    FLAGGED_RECEIVES("recv", make_recv, receive_flags, receive_shapes),
    FLAGGED_RECEIVES("__recv_chk", make_recv_chk, receive_flags, only_usual),
    FLAGGED_RECEIVES("recvfrom", make_recvfrom, receive_flags, receivefrom_shapes),
    FLAGGED_RECEIVES("__recvfrom_chk", make_recvfrom_chk, receive_flags, only_usual),
    FLAGGED_RECEIVES("recvmsg", make_recvmsg, receive_flags, receive_message_shapes),
    FLAGGED_RECEIVES("recvmmsg", make_recvmmsg, receive_flags, several_shapes),
    FLAGGED_RECEIVES("preadv2", make_preadv2, vector_flags, vector_shapes),
    FLAGGED_RECEIVES("splice in", make_splice_in, splice_flags, splice_shapes),
    PLAIN_SENDS("write", make_write, send_shapes, NULL),
    PLAIN_SENDS("writev", make_writev, vector_shapes, NULL),
    FLAGGED_SENDS("send", make_send, send_flags, send_shapes, NULL),
    FLAGGED_SENDS("sendto", make_sendto, send_flags, sendto_shapes, NULL),
    FLAGGED_SENDS("sendmsg", make_sendmsg, send_flags, send_message_shapes, NULL),
    FLAGGED_SENDS("sendmmsg", make_sendmmsg, send_flags, send_several_shapes, NULL),
    FLAGGED_SENDS("pwritev2", make_pwritev2, vector_flags, vector_shapes, NULL),
    PLAIN_SENDS("sendfile", make_sendfile, file_shapes, NULL),
    FLAGGED_SENDS("splice out", make_splice_out, splice_flags, splice_shapes, fill_pipe),
    PLAIN_SENDS("dprintf", make_dprintf, only_usual, NULL),
    PLAIN_SENDS("fdopen", make_fdopen, only_usual, NULL),
    WAITS("poll", make_poll, poll_flags, poll_shapes, NULL),
    WAITS("ppoll", make_ppoll, poll_flags, ppoll_shapes, NULL),
    WAITS("__poll_chk", make_poll_chk, poll_flags, only_usual, NULL),
    WAITS("__ppoll_chk", make_ppoll_chk, poll_flags, only_usual, NULL),
    WAITS("select", make_select, select_flags, select_shapes, NULL),
    WAITS("pselect", make_pselect, select_flags, pselect_shapes, NULL),
    WAITS("epoll_wait", make_epoll_wait, epoll_flags, epoll_shapes, arm_set),
    WAITS("epoll_pwait", make_epoll_pwait, epoll_flags, epoll_pwait_shapes, arm_set),
    WAITS("epoll_pwait2", make_epoll_pwait2, epoll_flags, epoll_pwait2_shapes, arm_set),
    ASKS("epoll_ctl", make_epoll_ctl, operations, control_shapes, 1 << BLOCKING),
    ASKS("getsockopt", make_getsockopt, read_options, read_shapes, 1 << BLOCKING),
    ASKS("setsockopt", make_setsockopt, set_options, set_shapes, 1 << BLOCKING),
    ASKS("ioctl", make_ioctl, requests, request_shapes, PLAIN_MODES),
    ASKS("fcntl", make_fcntl, commands, command_shapes, PLAIN_MODES),
    ASKS("getsockname", make_getsockname, nothing_else, name_shapes, PLAIN_MODES),
    ASKS("getpeername", make_getpeername, nothing_else, name_shapes, PLAIN_MODES),
    ASKS("shutdown", make_shutdown, ways_to_shut, only_usual, PLAIN_MODES),
    ASKS("connect", make_connect, families, connect_shapes, PLAIN_MODES),
    ASKS("listen", make_listen, nothing_else, only_usual, PLAIN_MODES),
    ASKS("accept", make_accept, nothing_else, accept_shapes, PLAIN_MODES),
    ASKS("accept4", make_accept4, accept_flags, accept_shapes, PLAIN_MODES),
    ASKS("dup", make_dup, nothing_else, only_usual, PLAIN_MODES),
    ASKS("dup2", make_dup2, nothing_else, copy_shapes, PLAIN_MODES),
    ASKS("dup3", make_dup3, copy_flags, copy_shapes, PLAIN_MODES),
    ASKS("close", make_close, nothing_else, only_usual, PLAIN_MODES),
    ASKS("close_range", make_close_range, range_flags, only_usual, PLAIN_MODES),
    ASKS("sockatmark", make_sockatmark, nothing_else, only_usual, PLAIN_MODES),
};

/* With unusual shapes go no flag, and each of the first ones, which change most. */
static int flags_with_shapes(const struct call *call)
{
    return call->flag_count < 3 ? call->flag_count : 3;
}

/* Flags, and arguments, of a call: none, each flag, each pair; then the unusual shapes. */
static int variants_of(const struct call *call)
{
    int flags = call->flag_count;
    return call->pairs ? 1 + flags + flags * (flags - 1) / 2 + (call->shape_count - 1) * (1 + flags_with_shapes(call)) : flags * call->shape_count;
}

static int modes_of(const struct call *call)
{
    return __builtin_popcount(call->modes);
}

static int cases_of(const struct call *call)
{
    return variants_of(call) * modes_of(call) * call->situation_count;
}

/* The flags of one of the sets without flag, with each one, with each pair. */
static int flags_of(const struct call *call, int number)
{
    if (number == 0)
        return 0;
    if (number <= call->flag_count)
        return call->flags[number - 1].value;
    number -= call->flag_count + 1;
    for (int first = 0; first < call->flag_count; first++) {
        int others = call->flag_count - first - 1;
        if (number < others)
            return call->flags[first].value | call->flags[first + 1 + number].value;
        number -= others;
    }
    CHECK(!"such flags");
}

static void decode_variant(struct play *play, int number)
{
    const struct call *call = play->call;
    int sets = 1 + call->flag_count + call->flag_count * (call->flag_count - 1) / 2;
    if (!call->pairs) {
        play->flags = number % call->flag_count;
        play->shape = number / call->flag_count;
    } else if (number < sets) {
        play->flags = flags_of(call, number);
    } else {
        play->flags = flags_of(call, (number - sets) % (1 + flags_with_shapes(call)));
        play->shape = 1 + (number - sets) / (1 + flags_with_shapes(call));
    }
}

static void decode(struct play *play, int number)
{
    play->number = number;
    for (play->call = calls; number >= cases_of(play->call); play->call++) {
        number -= cases_of(play->call);
        CHECK(play->call + 1 < calls + COUNT(calls));
    }
    play->situation = &play->call->situations[number % play->call->situation_count];
    number /= play->call->situation_count;
    int mode = number % modes_of(play->call);
    for (play->mode = 0; !(play->call->modes >> play->mode & 1) || mode-- > 0; play->mode++)
        ;
    decode_variant(play, number / modes_of(play->call));
}

static void print_case(const struct play *play)
{
    const struct call *call = play->call;
    printf("%d %s", play->number, call->name);
    if (!call->pairs)
        printf(" %s", call->flags[play->flags].name);
    for (int at = 0; at < call->flag_count && call->pairs; at++)
        if (play->flags & call->flags[at].value)
            printf(" %s", call->flags[at].name);
    printf("; %s; %s; %s |", shape_of(play), mode_names[play->mode], play->situation->name);
}

static void print_result(const struct play *play, int acts, int is_full)
{
    char bytes[56];
    long result = play->result;
    for (size_t at = 0; at < sizeof bytes - 1; at++)
        bytes[at] = play->buffer[at] >= '!' && play->buffer[at] <= '~' ? play->buffer[at] : '?';
    bytes[sizeof bytes - 1] = 0;
    if (play->faulted)
        printf(" fault");
    else if (is_full && play->call->sends && result > 0)
        printf(" result=some"); /* how much fits is the queues' affair */
    else
        printf(" result=%ld", result);
    printf(" errno=%d%s", result < 0 ? play->error : 0, play->said);
    printf("%s acts=%d", is_full ? " room" : "", acts);
    if (play->call->situations == receiving)
        printf(" bytes=%s/%x", bytes, hash(0, play->buffer, sizeof play->buffer));
    if (play->pipes)
        printf(" SIGPIPE=%d", play->pipes);
}

static void play_case(int number, int acts)
{
    struct play *play = calloc(1, sizeof *play);
    struct received received = {.is_pattern = 1};
    CHECK(play != NULL);
    decode(play, number);
    play->extra = -1;
    memset(play->buffer, '.', sizeof play->buffer);
    if (play->call->sends)
        for (size_t at = 0; at < sizeof play->buffer; at++)
            play->buffer[at] = digits[at % 10];
    play->much = digits_for_ever;
    memcpy(edge, digits, 2);
    CHECK(lseek(file, 0, SEEK_SET) == 0);
    print_case(play);
    alarm(300);
    prepare(play);
    int done = perform(play, acts, &received);
    if (done < 0) {
        printf(" hangs\n");
        fflush(stdout);
        _exit(0);
    }
    int is_full = is_about_room(play);
    print_result(play, done, is_full);
    print_rest(play, &received, is_full);
    printf("\n");
    fflush(stdout);
    close(play->set), close(play->other[0]), close(play->other[1]);
    free(play);
}

static void on_fault(int signal)
{
    (void)signal;
    if (playing == NULL)
        _exit(9);
    siglongjmp(playing->back, 1);
}

static void on_interrupt(int signal)
{
    (void)signal;
}

static void on_pipe(int signal)
{
    (void)signal;
    if (playing != NULL)
        playing->pipes++;
}

static void set_up(void)
{
    struct sigaction fault = {.sa_handler = on_fault, .sa_flags = SA_NODEFER}, pipes = {.sa_handler = on_pipe}, interrupt = {.sa_handler = on_interrupt};
    socklen_t size = sizeof listens;
    CHECK(sigaction(SIGSEGV, &fault, NULL) == 0 && sigaction(SIGBUS, &fault, NULL) == 0 && sigaction(SIGPIPE, &pipes, NULL) == 0);
    CHECK(sigaction(SIGUSR1, &interrupt, NULL) == 0);
    hole = mmap(NULL, 1 << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fixed = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *two = mmap(NULL, 2 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(hole != MAP_FAILED && fixed != MAP_FAILED && two != MAP_FAILED && mprotect(two + 4096, 4096, PROT_NONE) == 0);
    edge = two + 4096 - 2;
    for (size_t at = 0; at < sizeof digits_for_ever; at++)
        digits_for_ever[at] = digits[at % 10];
    CHECK((file = memfd_create("digits", MFD_CLOEXEC)) >= 0 && write(file, digits_for_ever, sizeof digits_for_ever) == sizeof digits_for_ever);
    listens = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&listens, size) == 0 && listen(listener, 16) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&listens, &size) == 0);
}

int main(int count, char **words)
{
    int number, acts;
    CHECK(count == 2);
    if (strcmp(words[1], "calls") == 0) {
        for (int at = 0; at < COUNT(calls); at++)
            printf("%s: %d\n", calls[at].name, cases_of(&calls[at]));
        return 0;
    }
    if (strcmp(words[1], "cases") == 0) {
        int total = 0;
        for (int at = 0; at < COUNT(calls); at++)
            total += cases_of(&calls[at]);
        for (int at = 0; at < total; at++) {
            struct play play = {0};
            decode(&play, at);
            print_case(&play);
            printf("\n");
        }
        return 0;
    }
    is_moving = strcmp(words[1], "moving") == 0;
    is_moved = is_moving || strcmp(words[1], "nic") == 0;
    set_up();
    while (scanf("%d %d", &number, &acts) == 2)
        play_case(number, acts);
    return 0;
}
