/* shutdown(2) of receiving alone, again and again, while connections move: the other direction goes on. */

#include "sockets.h"
#include <poll.h>

/* After so many exchanges: others have moved, or move, by then. */
static void shut_receiving(int exchanges)
{
    struct pair ends = connect_pair();
    char got;
    for (int done = 0; done < exchanges; done++) {
        exchange(ends.server, ends.client, "hello\n");
        exchange(ends.client, ends.server, "hello\n");
    }
    struct pollfd entry = {.fd = ends.server, .events = POLLIN | POLLRDHUP};
    CHECK(shutdown(ends.server, SHUT_RD) == 0);
    CHECK(poll(&entry, 1, 0) == 1 && entry.revents == (POLLIN | POLLRDHUP) && read(ends.server, &got, 1) == 0);
    exchange(ends.server, ends.client, "on\n");
    CHECK(recv(ends.client, &got, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    CHECK(shutdown(ends.server, SHUT_WR) == 0 && recv(ends.client, &got, 1, 0) == 0);
    close(ends.server);
    close(ends.client);
}

int main(int count, char **words)
{
    CHECK(count == 2);
    alarm(STANDS_STILL);
    for (int left = atoi(words[1]); left > 0; left--)
        shut_receiving(1 + left % 100);
    return 0;
}
