/* A debugger that looks for a moment at a process whose first thread sleeps in a call. Usage: debugger PROCESS attach|seize */

#include "debugger.h"

int main(int arguments, char **argument)
{
    alarm(STANDS_STILL);
    CHECK(arguments == 3);
    debug(atoi(argument[1]), atoi(argument[1]), strcmp(argument[2], "seize") == 0);
    return 0;
}
