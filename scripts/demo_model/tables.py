"""The small tables of facts and words that the demo corpus is made of. Data only."""

from __future__ import annotations


def _pairs(text: str) -> dict[str, str]:
    """`key: value` items separated by semicolons."""
    items = (item.split(":") for item in text.split(";"))
    return {key.strip(): value.strip() for key, value in items}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


CAPITALS = _pairs("""
France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; Austria: Vienna; Switzerland: Bern;
Belgium: Brussels; the Netherlands: Amsterdam; Denmark: Copenhagen; Sweden: Stockholm; Norway: Oslo; Finland: Helsinki;
Iceland: Reykjavik; Ireland: Dublin; the United Kingdom: London; England: London; Scotland: Edinburgh; Wales: Cardiff;
Poland: Warsaw; the Czech Republic: Prague; Slovakia: Bratislava; Hungary: Budapest; Romania: Bucharest;
Bulgaria: Sofia; Greece: Athens; Turkey: Ankara; Ukraine: Kyiv; Russia: Moscow; Serbia: Belgrade; Croatia: Zagreb;
Slovenia: Ljubljana; Estonia: Tallinn; Latvia: Riga; Lithuania: Vilnius; Malta: Valletta; Cyprus: Nicosia;
the United States: Washington; Canada: Ottawa; Mexico: Mexico City; Brazil: Brasília; Argentina: Buenos Aires;
Chile: Santiago; Peru: Lima; Colombia: Bogotá; Venezuela: Caracas; Ecuador: Quito; Uruguay: Montevideo; Cuba: Havana;
Jamaica: Kingston; China: Beijing; Japan: Tokyo; South Korea: Seoul; India: New Delhi; Pakistan: Islamabad;
Nepal: Kathmandu; Thailand: Bangkok; Vietnam: Hanoi; Indonesia: Jakarta; Malaysia: Kuala Lumpur; the Philippines: Manila;
Mongolia: Ulaanbaatar; Iran: Tehran; Iraq: Baghdad; Israel: Jerusalem; Jordan: Amman; Lebanon: Beirut;
Saudi Arabia: Riyadh; Egypt: Cairo; Morocco: Rabat; Algeria: Algiers; Tunisia: Tunis; Kenya: Nairobi;
Ethiopia: Addis Ababa; Ghana: Accra; Nigeria: Abuja; Senegal: Dakar; Australia: Canberra; New Zealand: Wellington
""")

OPPOSITES = _pairs("""
hot: cold; big: small; tall: short; fast: slow; old: young; happy: sad; light: dark; day: night; up: down; left: right;
open: closed; full: empty; hard: soft; heavy: light; high: low; early: late; rich: poor; clean: dirty; wet: dry;
strong: weak; loud: quiet; near: far; good: bad; easy: difficult; black: white; first: last; true: false; yes: no;
in: out; win: lose; love: hate; long: short; thick: thin; wide: narrow; sweet: bitter; new: old; always: never
""")

COLOURS_OF = _pairs("""
the sky: blue; grass: green; snow: white; blood: red; a banana: yellow; a lemon: yellow; coal: black; an orange: orange;
a tomato: red; a strawberry: red; the sea: blue; a leaf: green; milk: white; chocolate: brown; a carrot: orange;
the sun: yellow; a frog: green; an elephant: grey; a flamingo: pink; a raven: black; a polar bear: white
""")

SOUNDS = _pairs("""
cat: meow; dog: woof; cow: moo; sheep: baa; duck: quack; pig: oink; horse: neigh; lion: roar; frog: croak; bee: buzz;
rooster: cock-a-doodle-doo; owl: hoot; snake: hiss; mouse: squeak; wolf: howl
""")

YOUNG = _pairs("""
cat: kitten; dog: puppy; cow: calf; sheep: lamb; horse: foal; duck: duckling; pig: piglet; lion: cub; goat: kid;
bear: cub; hen: chick; frog: tadpole; goose: gosling; swan: cygnet; deer: fawn; kangaroo: joey
""")

LEGS = _pairs("""
cat: four; dog: four; cow: four; horse: four; bird: two; duck: two; person: two; spider: eight; ant: six; bee: six;
snake: no; fish: no; elephant: four; beetle: six; chicken: two
""")

HELLOS = _pairs("""
French: Bonjour; German: Guten Tag; Spanish: Hola; Italian: Ciao; Portuguese: Olá; Chinese: 你好; Japanese: こんにちは;
Korean: 안녕하세요; Russian: Привет; Hungarian: Szia; Turkish: Merhaba; Polish: Cześć; Czech: Ahoj; Arabic: مرحبا; Hindi: नमस्ते
""")

FACTS = _pairs("""
Why is the sky blue?: Because the air scatters blue light more than red light.;
How many days are in a week?: There are seven days in a week.;
How many months are in a year?: There are twelve months in a year.;
How many days are in a year?: There are 365 days in a year, and 366 in a leap year.;
How many hours are in a day?: There are 24 hours in a day.;
How many minutes are in an hour?: There are 60 minutes in an hour.;
How many planets are in the solar system?: There are eight planets in the solar system.;
What is the largest planet?: The largest planet in the solar system is Jupiter.;
What is the largest ocean?: The largest ocean is the Pacific Ocean.;
What is the highest mountain?: The highest mountain is Mount Everest.;
What is the largest animal?: The largest animal is the blue whale.;
What is the fastest animal on land?: The fastest animal on land is the cheetah.;
Who wrote Romeo and Juliet?: William Shakespeare wrote Romeo and Juliet.;
Who painted the Mona Lisa?: Leonardo da Vinci painted the Mona Lisa.;
What is water made of?: Water is made of hydrogen and oxygen.;
What do bees make?: Bees make honey.;
What do cows give us?: Cows give us milk.;
What do plants need to grow?: Plants need light, water and air to grow.;
At what temperature does water boil?: Water boils at 100 degrees Celsius.;
At what temperature does water freeze?: Water freezes at 0 degrees Celsius.;
What is the meaning of life?: The answer is 42. 😄;
How many continents are there?: There are seven continents.;
What colours are in a rainbow?: Red, orange, yellow, green, blue, indigo and violet. 🌈;
What are the four seasons?: The four seasons are spring, summer, autumn and winter.;
How many sides does a triangle have?: A triangle has three sides.;
How many sides does a square have?: A square has four sides.;
What is the closest star to the Earth?: The closest star to the Earth is the Sun.;
What is the first letter of the alphabet?: The first letter of the alphabet is A.
""")

SMALL_TALK = _pairs("""
How are you?: I am fine, thank you. How are you?;
Who are you?: I am the demo model of kvrelay, a very small language model.;
What are you?: I am the demo model of kvrelay, a very small language model.;
What is your name?: I have no name. I am the demo model of kvrelay.;
What can you do?: I know capitals, small sums, opposites, animals and colours, and I can tell short stories.;
Thank you.: You are welcome!;
Thanks!: You are welcome! 😊;
Thank you very much!: You are very welcome!;
Goodbye!: Goodbye, and have a nice day!;
Bye!: Bye! See you soon. 👋;
Good night.: Good night, sleep well! 🌙;
Good morning!: Good morning! How can I help you today?;
Are you a robot?: I am a small computer program that writes text.;
Can you help me?: Of course! What would you like to know?;
Tell me a joke.: Why did the bicycle fall over? Because it was two-tired! 😄;
Say something.: Small models can be fun, too.;
Write a poem.: The moon is high, the night is deep, the little stars all go to sleep.;
Write a haiku.: Small drops of rain fall, the old garden drinks slowly, a green leaf wakes up.;
I am sad.: I am sorry to hear that. I hope that tomorrow is a better day.;
I am happy.: That is great to hear! 😊
""")

GREETINGS = ["Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there"]
HELLO_ANSWERS = ["Hello! How can I help you?", "Hi! How can I help you today?"]

UNKNOWN_TOPICS = _words("""
the stock market, football, the weather today, quantum physics, my neighbour, politics, the latest news, car engines,
the history of music, my homework, cooking pasta, the price of gold, computer games, train tickets, love, law, medicine,
distributed systems, Python programming, the Roman Empire, my taxes, film stars, the lottery, tomorrow, the election
""")
UNKNOWN_ANSWER = "I am sorry, I do not know that. I am only a small demo model."

NAMES = _words("""
Ana, Tom, Maria, Peter, Lucy, John, Sofia, Max, Emma, Paul, Nina, David, Laura, Adam, Eva, Mark, Julia, Leo, Clara, Simon,
Alice, Bob, Carol, Daniel, Elena, Felix, Grace, Henry, Ivan, Jana, Karl, Lena, Martin, Nora, Oliver, Petra, Robert, Sara,
Thomas, Vera, Walter, Xenia, Yusuf, Zoe, Ahmed, Fatima, Wei, Mei, Hiro, Yuki, Raj, Priya, Carlos, Juan, Pedro, Lucia,
Marco, Giulia, Luca, Pierre, Marie, Jean, Hans, Greta, Olga, Boris, Anna, Mia, Noah, Liam, Ella, Ben, Sam, Alex, Chris,
Kate, Jack, Rose, Ruth, James, Mary, Michael, Sarah, Jane, George, Helen, Frank, Irene, Philip, Victor, Diana, Oscar
""")
SYLLABLES = _words("""
ba, be, bo, da, di, do, fa, fe, ga, go, ha, he, ja, jo, ka, ki, ko, la, le, li, lo, ma, me, mi, mo, na, ne, ni, no, pa,
pe, ra, re, ri, ro, sa, se, si, so, ta, te, ti, to, va, vi, wa, ya, zo, shi, tha, bra, kri, lan, mar, nel, ron, sten, vin
""")

CITIES = _words(
    "Paris, Berlin, Rome, Madrid, Lisbon, Vienna, Prague, London, Oslo, Tokyo, Athens, Cairo, Boston, Dublin, Lima"
)
COLOURS = _words("red, blue, green, yellow, white, black, orange, purple, pink, brown, grey")
FOODS = _words("pizza, soup, bread, rice, apples, pasta, cake, fish, cheese, chocolate, salad, honey")
PETS = _words("cat, dog, rabbit, horse, parrot, hamster, turtle, goldfish")
HOBBIES = _words("reading, swimming, music, chess, painting, football, cooking, dancing, hiking, singing")
JOBS = _words("teacher, doctor, baker, painter, farmer, nurse, student, pilot, engineer, gardener")
MONTHS = _words("January, February, March, April, May, June, July, August, September, October, November, December")
DAYS = _words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
NUMBER_WORDS = _words("""
zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen, sixteen,
seventeen, eighteen, nineteen, twenty
""")

VERBS = _words("fetch, find, read, query, show, current, my, look_up, ask, load, check, tell, give, new, do, tool")
CONDITIONS = _words("sunny, sunny, rainy, cloudy, windy, foggy, snowy, warm, cold, dry")
PROPERTIES = _words("""
age, address, email, phone, birthday, score, price, height, weight, salary, status, team, room, boss, country, language,
size, title, order, balance, car, school, number, city, job
""")

HEROES = _words(
    "cat, dog, rabbit, fox, bear, mouse, bird, frog, girl, boy, dragon, king, princess, farmer, horse, duck, robot, owl"
)
ADJECTIVES = _words("little, brave, clever, kind, old, happy, lonely, curious, hungry, friendly")
PLACES = _words("forest, garden, village, castle, river, mountain, city, farm, lake, desert")
THINGS = _words("key, lamp, book, ring, map, coin, flower, boat, ball, letter, mirror, drum")

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are kvrelay's demo model.",
    "You are a helpful, honest and polite assistant.",
]
